//! The only module that names wgpu: adapters, buffers, kernels, the recorder and the two transfers.
