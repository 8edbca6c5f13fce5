"""The models there are. A new one is a file, a line here, a YAML and a test."""

MODELS = {
    "decoder": "curry_train.models.decoder:Decoder",
    "spiking": "curry_train.models.spiking:SpikingTransformer",
}
