"""Raw text -> corpora: formats, cleaning, chunks of rows, fingerprints of sentences, held-out text, parallel work."""
