"""Data: prepares a corpus of text as token shards, and reads batches from them.

corpus · encode · tokenizer   reads documents from files; turns them into tokens
prepare · shards              writes a prepared corpus to disk; the format on disk
loader · prefetch             selects the tokens that each rank reads; reads them one step ahead
"""
