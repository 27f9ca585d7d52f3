"""Speed and memory, methods side by side: attention of one layer, whole models, the largest context that fits."""
