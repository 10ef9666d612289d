"""The config blocks that serving engines read, one module per `quant_method`."""
