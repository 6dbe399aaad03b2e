"""What is in a dataset, whether it is whole, and how well it is shuffled.

The modules::

    verification   a dataset -> what is damaged in it
    decoding       samples of a shard -> which fields cannot be decoded
    findings       what was found to be wrong
    contents       which samples there are, one member of one sample, statistics
    mixing         how well an order mixes, as numbers
    shuffle        how well a dataset is shuffled, in words and a picture
"""
