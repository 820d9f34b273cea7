// Panels: how the matrix units read an operand of `rows` rows along the contraction. Steps are padded by zeros to blocks of
// 64; a block is PANELS panels (2 of codes, 4 of halves); a panel holds 32 bytes of every row, row after row:
//   16 bytes number (panel * rows + row) * 2 + half.
// Whatever the tile, a workgroup's loads are then whole cache lines. The groups of a weight follow each other. Groups of rows
// that are contracted (tn) start at blocks of their own.

// First block of group `g`, which starts at row `start`: enough blocks before it for all groups, whatever their sizes, since
// a group of r rows has at most floor(r / 64) + 1.
fn first_block(g: u32, start: u32) -> u32 {
  return start / 64u + g;
}

// Bytes as a 4 x 4 matrix, transposed: byte i of word j becomes byte j of word i.
fn transpose_bytes(w: vec4<u32>) -> vec4<u32> {
  let even = (w.xz & vec2<u32>(0x00ff00ffu)) | ((w.yw & vec2<u32>(0x00ff00ffu)) << vec2<u32>(8u));
  let odd = ((w.xz >> vec2<u32>(8u)) & vec2<u32>(0x00ff00ffu)) | (w.yw & vec2<u32>(0xff00ff00u));
  return vec4<u32>(
    (even.x & 0xffffu) | (even.y << 16u), (odd.x & 0xffffu) | (odd.y << 16u),
    (even.x >> 16u) | (even.y & 0xffff0000u), (odd.x >> 16u) | (odd.y & 0xffff0000u));
}
