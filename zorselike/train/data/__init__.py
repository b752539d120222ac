"""Data: documents to tokens to rows, whose order depends on seed and step alone."""
