"""What a step sends, exactly: bytes by axis and purpose."""
