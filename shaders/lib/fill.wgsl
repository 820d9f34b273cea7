// Sets every word of a buffer, for poisoned-memory runs.
struct Fill {
  words: u32,
  word: u32,
}

@group(0) @binding(0) var<uniform> p: Fill;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  for (var i = 0u; i < 4u; i++) {
    let at = grid_index(wg, n) * 1024u + i * 256u + li;
    if at < p.words {
      out[at] = p.word;
    }
  }
}
