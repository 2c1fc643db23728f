"""One mechanism for every change of weight layout: boxes, a pure plan, and transports."""
