"""A model cut into ministages: by its structure, by a convention, by the user or by `torch.export`, and
initialized one unit at a time (Zorse 5.1)."""
