// Sums and maxima over groups of LANES neighbouring threads, of WG in a workgroup; LANES divides WG, powers of two.
// TREE is 0 where LANES is 1 (software adapters: no workgroup memory), else 1. Every thread of the workgroup calls.

//!repeat i TREE
var<workgroup> lanes_tree: array<f32, WG>;
//!end

// Sum of `v` over the thread's group, as a tree: the order is fixed.
fn lanes_sum(li: u32, v: f32) -> f32 {
//!repeat i TREE
  lanes_tree[li] = v;
  workgroupBarrier();
  for (var half = LANES / 2u; half > 0u; half /= 2u) {
    if li % LANES < half {
      lanes_tree[li] += lanes_tree[li + half];
    }
    workgroupBarrier();
  }
  let all = lanes_tree[li - li % LANES];
  workgroupBarrier();
  return all;
//!end
  return v;
}

// Largest `v` of the thread's group.
fn lanes_max(li: u32, v: f32) -> f32 {
//!repeat i TREE
  lanes_tree[li] = v;
  workgroupBarrier();
  for (var half = LANES / 2u; half > 0u; half /= 2u) {
    if li % LANES < half {
      lanes_tree[li] = max(lanes_tree[li], lanes_tree[li + half]);
    }
    workgroupBarrier();
  }
  let all = lanes_tree[li - li % LANES];
  workgroupBarrier();
  return all;
//!end
  return v;
}
