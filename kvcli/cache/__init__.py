"""The compressed cache: token storage and its transformers `Cache` interface."""
