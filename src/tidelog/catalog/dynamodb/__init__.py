"""The catalog in one DynamoDB table.

``catalog`` has the rows, ``client`` all that we know of boto3 and what its errors mean. A reply
that was cut short or damaged is a lost reply, never a missing row.
"""
