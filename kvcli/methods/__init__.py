"""The methods, each a file or a folder named in `kvcli.registry`, and what they share: codes, codecs, `Method`."""
