"""Raw text -> corpora: formats, cleaning, filters, fingerprints of sentences, text kept aside, work by many processes."""
