"""The compressed cache: what is stored of each token, and the face it shows to transformers."""
