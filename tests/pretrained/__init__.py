"""Pretrained models: read to parts, trained, and handed back."""
