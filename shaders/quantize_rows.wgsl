// Quantization of bf16 by rows for GPUs, in units of eight columns (16 bytes of bf16): of rows in memory, or of rows that are being
// made (lib/row_sources.wgsl), which then are not read again. A team of TEAM lanes holds a row in registers: its top, then its
// codes. The magnitudes of a unit lie as the row does, two in a word.
// What this adds to the simple algorithm (quantize.wgsl):
// 1. Loads of 16 bytes, UNITS in flight per lane, and those of the next row on their way while this one is worked on.
// 2. Codes by way of halves, two at a time: a sixth of the operations of the exact encoder (lib/units.wgsl).
// 3. With TOPS, the columns' tops too, chunk by chunk and side by side: quantize_wide.wgsl makes codes by columns of them.
// IN_PANELS: codes go into panels (lib/panels.wgsl) of the contraction, with its padding.

struct Lines {
  rows: u32,
  cols: u32,
  groups: u32,
  group_rows: u32, // rows of each group when GROUPED is 0
  top_k: u32,      // rows that the source has of each token
  rstd: u32,       // where the factors of normed rows begin, behind the de-scales
  eps: f32,        // of the norm
}

@group(0) @binding(0) var<uniform> p: Lines;
//!repeat g GROUPED
@group(0) @binding(INPUTS + 1u) var<storage, read> offs: array<u32>;
//!end
//!repeat g EVEN
var<private> offs: array<u32, 1>; // for the text of lib/groups.wgsl, which does not read it then
//!end
@group(0) @binding(INPUTS + GROUPED + 1u) var<storage, read_write> descales: array<u32>;
@group(0) @binding(INPUTS + GROUPED + 2u) var<storage, read_write> codes: array<Unit>;
//!repeat t TOPS
@group(0) @binding(INPUTS + GROUPED + 3u) var<storage, read_write> column_tops: array<vec4<u32>>;
//!end

// CHUNK rows of one group, LANES / TEAM teams with a row each at a time. A lane has every TEAM-th unit of its rows. Without TOPS a team
// has one row: CHUNK is LANES / TEAM.
@compute @workgroup_size(LANES)
fn rows(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let chunk = grid_index(wg, n);
  let range = chunk_rows(chunk, CHUNK, p.groups, p.group_rows, p.rows);
  let units = div_up(p.cols, 8u);
  let lane = li % TEAM;
//!repeat t TOPS
//!repeat i UNITS
  var even$i = vec4<u32>();
  var odd$i = vec4<u32>();
//!end
//!end
  // Past the end of the chunk the last row again, past the end of a row its last unit.
  let last = max(range.end, 1u) - 1u;
  var next_line = line(min(range.first + li / TEAM, last));
//!repeat i UNITS
  var next$i = load(next_line, unit_of($iu, lane, units));
//!end
  for (var start = range.first; start < range.end; start += LANES / TEAM) {
    let row = start + li / TEAM;
//!repeat s AT_ONCE
    let here = next_line;
//!repeat i UNITS
    let v$i = make(next$i, here, unit_of($iu, lane, units));
//!end
//!end
//!repeat s NORMED
    var squares = Squares();
//!repeat i UNITS
    let x$i = added(next$i);
    squares = with_squares(squares, x$i, WHOLE == 1u || $iu * TEAM + lane < units);
    if row < range.end && (WHOLE == 1u || $iu * TEAM + lane < units) {
      keep_sum(row * units + $iu * TEAM + lane, x$i);
    }
//!end
    let rstd = norm_factor(team_sum(squares, li));
    if row < range.end && lane == 0u {
      descales[p.rstd + row] = bitcast<u32>(rstd);
    }
//!repeat i UNITS
    let v$i = make(x$i, rstd, unit_of($iu, lane, units));
//!end
//!end
//!repeat t TOPS
    next_line = line(min(row + LANES / TEAM, last));
//!repeat i UNITS
    next$i = load(next_line, unit_of($iu, lane, units));
//!end
//!repeat i UNITS
    even$i = max(even$i, evens(v$i));
    odd$i = max(odd$i, odds(v$i));
//!end
//!end
    var top = vec4<u32>();
//!repeat i UNITS
    top = max(top, max(evens(v$i), odds(v$i)));
//!end
    let r = descale_bits(row_top(li, largest(top)));
    if row < range.end {
      if lane == 0u {
        descales[row] = r;
      }
//!repeat i UNITS
      if WHOLE == 1u || $iu * TEAM + lane < units {
        keep(row * units + $iu * TEAM + lane, v$i);
      }
//!end
      if IN_PANELS == 1u {
        for (var unit = units + lane; unit < div_up(units, 8u) * 8u; unit += TEAM) {
          codes[place(row, unit)] = Unit();
        }
      }
      if r > CAREFUL {
        careful_row(row, units, lane, r);
      } else {
        let s = factors(vec4<u32>(r));
//!repeat i UNITS
        if WHOLE == 1u || $iu * TEAM + lane < units {
          codes[place(row, $iu * TEAM + lane)] = quick_unit(v$i, s, s);
        }
//!end
      }
    }
    // Before the next rows' tops are written.
    workgroupBarrier();
  }
//!repeat t TOPS
//!repeat i UNITS
  let all$i = merge(li, TEAM, even$i, odd$i);
  if li < TEAM && (WHOLE == 1u || $iu * TEAM + lane < units) && range.first < range.end {
    column_tops[chunk * units + $iu * TEAM + lane] = all$i;
  }
//!end
//!end
}

fn unit_of(i: u32, lane: u32, units: u32) -> u32 {
  if WHOLE == 1u {
    return i * TEAM + lane;
  }
  return min(i * TEAM + lane, units - 1u);
}

fn careful_row(row: u32, units: u32, lane: u32, r: u32) {
  for (var unit = lane; unit < units; unit += TEAM) {
    codes[place(row, unit)] = careful_unit(again(row * units + unit), unit, vec4<u32>(r), vec4<u32>(r));
  }
}
