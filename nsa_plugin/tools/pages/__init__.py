"""The benchmark pages of the documentation, written from the records alone."""
