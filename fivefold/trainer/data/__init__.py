"""Data: prepares a corpus of text or of supervised samples as token shards, and reads batches from them.

corpus · encode · tokenizer   reads documents or records from files; turns them into tokens
supervised · chat_template    turns a record into tokens with what is trained; renders conversations
prepare · shards              writes a prepared corpus to disk; the format on disk
loader · packing · prefetch   selects the tokens that each rank reads; packs samples; reads one step ahead
samples                       prints what a corpus holds
"""
