"""Model families built from blocks, and their weights: built, mapped to canonical names, read and written."""
