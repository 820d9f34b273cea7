// The gated activation's function: silu(x) = x * sigmoid(x).

// exp of -|g| cannot overflow, so no infinity arises on the way.
fn sigmoid(g: vec4<f32>) -> vec4<f32> {
  let t = exp(-abs(g));
  return select(t, vec4<f32>(1.0), g >= vec4<f32>(0.0)) / (1.0 + t);
}

fn silu(g: vec4<f32>) -> vec4<f32> {
  return g * sigmoid(g);
}
