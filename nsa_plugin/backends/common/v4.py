"""What both engines know of DeepSeek-V4's caches."""

from __future__ import annotations

LAYOUT = "v4_fp8"

RATIOS = (0, 4, 128)
"""Compress ratios of layers; 0: the sliding window alone."""
