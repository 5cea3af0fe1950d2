"""From text to batches.

corpus · encode · tokenizer   documents from files; into tokens
prepare · shards              a corpus written to disk; its format
loader · prefetch             which tokens each rank reads; a step ahead
"""
