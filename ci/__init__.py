"""The project's own checks: set-up, the engine matrix, and the generated parts of the documentation."""
