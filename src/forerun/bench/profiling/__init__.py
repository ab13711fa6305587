"""`forerun profile`: measures what `forerun.plan` computes with, in this process or at a server."""
