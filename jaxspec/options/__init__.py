"""The option classes: EngineConfig for an engine, SpeculativeConfig for speculation, SamplingParams for a request."""
