"""`forerun dynamo-worker`: an engine of NVIDIA Dynamo."""
