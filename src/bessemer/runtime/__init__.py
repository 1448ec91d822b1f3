"""Devices behind one interface, kernel measurements and phase marks. Importing the room itself needs no torch."""
