"""Engine servers as processes of their own: start, readiness, requests, answers and shutdown. No engine is imported."""
