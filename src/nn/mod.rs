//! Modules and the Llama4 model.
