"""Inspection: what a run did with its time. Importing the room needs no torch."""
