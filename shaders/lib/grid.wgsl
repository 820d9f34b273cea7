// Linear numbers for workgroups. A grid of more than 65535 workgroups is folded into x and y by the recorder.

// Linear number of workgroup `wg` in a grid of `n` (num_workgroups).
fn grid_index(wg: vec3<u32>, n: vec3<u32>) -> u32 {
  return wg.y * n.x + wg.x;
}

// ceil(a / b)
fn div_up(a: u32, b: u32) -> u32 {
  return (a + b - 1u) / b;
}
