// The bindings of products that read their operands as rows of quads.

@group(0) @binding(1) var<storage, read> a: array<A>;
@group(0) @binding(2) var<storage, read> b: array<B>;
@group(0) @binding(3) var<storage, read> offs: array<u32>;
@group(0) @binding(4) var<storage, read> row_scale: array<f32>;
@group(0) @binding(5) var<storage, read> col_scale: array<f32>;
@group(0) @binding(6) var<storage, read_write> out: array<OUT>;
