"""The drift watch: does speculation still give what plain decoding would? Statistics, shadows, alarms."""
