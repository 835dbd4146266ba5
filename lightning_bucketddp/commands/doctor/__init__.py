"""`bucketddp doctor`: is this machine ready for a long run?"""
