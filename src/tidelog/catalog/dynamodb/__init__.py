"""The catalog in one DynamoDB table.

``catalog`` has the rows, ``client`` all that we know about boto3 and its errors. A reply that was
cut off or damaged is a lost reply, never a missing row.
"""
