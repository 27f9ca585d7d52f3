"""What connects kvcli to other programs: each behind its extra, and imported by nothing else of kvcli."""
