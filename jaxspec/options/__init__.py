"""Options of the engine, of speculation and of sampling."""
