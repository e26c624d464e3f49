"""Adapter code that both engines share."""
