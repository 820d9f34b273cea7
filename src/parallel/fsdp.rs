//! Fully sharded data parallel: shards of parameters, gradients and optimizer state on each rank.
//!
//! Definition: PyTorch FSDP2 (`fully_shard` with `MixedPrecisionPolicy`), 2.8: gather a block's parameters in
//! `param_dtype` when it is first needed, free them after (reshard), gather again for backward; convert its gradients
//! to `reduce_dtype`, reduce-scatter their mean, add to the f32 shard. One rank is not a special case: its all-gather
//! returns its input.

use super::home::{self, Home, offsets};
use super::hooks::{self, Unsharded};
use super::policy::Policy;
use crate::Result;
use crate::comm::Communicator;
use crate::comm::reduce::{self, Op};
use crate::gpu::{Buffer, Gpu};
use crate::num::DType;
use crate::ops::elementwise;
use crate::params::{Layout, ParamId, Place, Shards, Store, Table, Weights};
use crate::tensor::{Tensor, quad_bytes};
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// Bytes that this rank put on the wire so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireBytes {
    /// Payload of all-gathers.
    pub gathered: u64,
    /// Payload of reduce-scatters.
    pub reduced: u64,
}

/// An FSDP group: what is gathered, freed and reduced together.
struct Block {
    members: Vec<ParamId>,
    /// The memory of the whole parameters, where they do not lie in a store; freed on reshard, kept otherwise.
    home: Option<Home>,
    /// Whether what was gathered is current.
    live: bool,
    /// The parameters as the last gather left them; their memory goes with `home`.
    params: Vec<Tensor>,
    /// Whether each member was wrapped at step 0.
    kinds: Option<Vec<bool>>,
    /// Gradients that wait for the rest of the block.
    gradients: Vec<(ParamId, Tensor)>,
}

/// The sharded parameters of one rank and what is gathered of them.
pub struct Fsdp {
    gpu: Gpu,
    comm: Arc<dyn Communicator>,
    table: Table,
    layout: Layout,
    policy: Policy,
    /// f32 master shards; who writes them other than by [`Fsdp::set`] and [`Fsdp::update`] calls [`Fsdp::invalidate`].
    pub master: Store,
    /// All whole parameters in bf16, instead of homes: where [`Policy::keeps_low`].
    low: Option<Store>,
    /// Gradient shards of the step, in [`Policy::gradient_dtype`].
    pub grads: Store,
    blocks: RefCell<Vec<Block>>,
    wire: Cell<WireBytes>,
    backward: Cell<bool>,
    accumulate: Cell<bool>,
}

impl Fsdp {
    /// Zeros for every parameter of `table`; [`Fsdp::set`] gives them values.
    ///
    /// # Errors
    /// A shard over the adapter's limits, or out of memory.
    pub fn new(gpu: &Gpu, comm: Arc<dyn Communicator>, table: Table, policy: Policy) -> Result<Fsdp> {
        let layout = Layout::new(&table, comm.size(), gpu)?;
        let blocks = (0..table.blocks())
            .map(|b| Block {
                members: table.block(b),
                home: None,
                live: false,
                params: Vec::new(),
                kinds: None,
                gradients: Vec::new(),
            })
            .collect();
        let kept = policy.gradient_dtype(comm.size());
        let low = policy.keeps_low(comm.size());
        let low = low.then(|| Store::zeros(gpu, &layout, DType::BF16, "weights in bf16")).transpose()?;
        Ok(Fsdp {
            master: Store::zeros(gpu, &layout, DType::F32, "master weights")?,
            low,
            grads: Store::zeros(gpu, &layout, kept, "gradients")?,
            gpu: gpu.clone(),
            comm,
            table,
            layout,
            policy,
            blocks: RefCell::new(blocks),
            wire: Cell::default(),
            backward: Cell::new(false),
            accumulate: Cell::new(false),
        })
    }

    /// The parameter table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Where the shards lie.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Bytes on the wire so far.
    pub fn wire(&self) -> WireBytes {
        self.wire.get()
    }

    /// Sets this rank's shard of a parameter; `value(i)` gives element i of the whole, row-major. All cores ask for values. Whoever
    /// asks for the parameter next gets them.
    ///
    /// # Errors
    /// What the device reported.
    pub fn set(&self, id: ParamId, value: &(dyn Fn(usize) -> f32 + Sync)) -> Result<()> {
        let (spec, place) = (self.table.spec(id), self.layout.place(id));
        let cols = spec.shape.last().copied().unwrap_or(1);
        let shard = place.values(self.comm.rank(), cols, value);
        self.blocks.borrow_mut()[spec.block].live = false;
        let target = self.master.shard(place);
        let (buffer, offset) = target.memory();
        self.gpu.upload(buffer, offset, bytemuck::cast_slice(&shard))
    }

    /// Row-major values of a whole parameter of `store` (weights, gradients or moments), on every rank.
    ///
    /// # Errors
    /// Other ranks, or what the device reported.
    pub fn fetch(&self, store: &Store, id: ParamId) -> Result<Vec<f32>> {
        let (spec, place) = (self.table.spec(id), self.layout.place(id));
        let mine = store.shard(place).to_f32(&self.gpu)?;
        let mut all = vec![0f32; mine.len() * self.comm.size()];
        self.comm.all_gather(bytemuck::cast_slice(&mine), bytemuck::cast_slice_mut(&mut all))?;
        let cols = spec.shape.last().copied().unwrap_or(1);
        let rows = spec.numel() / cols.max(1);
        let width = cols.div_ceil(4) * 4;
        Ok(all.chunks(width).take(rows).flat_map(|r| r[..cols].iter().copied()).collect())
    }

    /// Says that a forward pass begins; its gradients are added to those of the step so far if `accumulate`, else they
    /// replace them.
    ///
    /// # Panics
    /// If gradients are to be added where the policy says that a step is one pass: the store may be too narrow for sums.
    #[track_caller]
    pub fn start(&self, accumulate: bool) {
        assert!(
            !accumulate || self.policy.accumulates,
            "fsdp: gradients of a pass are to be added, and the policy says one pass a step"
        );
        self.accumulate.set(accumulate);
        self.backward.set(false);
    }

    /// Says that backward begins: from now on a block that is left is not needed again in this pass.
    pub fn start_backward(&self) {
        self.backward.set(true);
    }

    /// Lets `step`, an optimizer's, change the master weights. What was gathered is forgotten, or stays where `step` wrote that
    /// too ([`Shards::take_low`]), and is not gathered again.
    ///
    /// # Errors
    /// Those of `step`.
    pub fn update(&self, step: impl FnOnce(&Shards<'_>) -> Result<()>) -> Result<()> {
        let shards = Shards::new(&self.master, &self.grads, self.low.as_ref());
        let done = step(&shards);
        if done.is_err() || !shards.has_low() {
            self.invalidate();
        }
        done
    }

    /// Forgets all gathered weights: something other than [`Fsdp::set`] and [`Fsdp::update`] has changed the master weights.
    pub fn invalidate(&self) {
        for block in self.blocks.borrow_mut().iter_mut() {
            block.live = false;
        }
    }

    /// The sum over ranks of a flat f32 (1).
    ///
    /// # Errors
    /// Other ranks, or what the device reported.
    pub fn sum_scalar(&self, local: Tensor) -> Result<Tensor> {
        if self.comm.size() == 1 {
            return Ok(local);
        }
        let (buffer, at) = local.memory();
        let mut sum: Vec<f32> =
            bytemuck::pod_collect_to_vec(&self.gpu.download(buffer, at, local.bytes())?);
        reduce::all_reduce_f32(&*self.comm, &mut sum, Op::Sum)?;
        self.gpu.upload(buffer, at, bytemuck::cast_slice(&sum))?;
        Ok(local)
    }

    /// The sums over ranks of flat u32 tensors, in one exchange.
    ///
    /// # Errors
    /// As [`Fsdp::sum_scalar`].
    pub fn sum_counts(&self, counts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        if self.comm.size() == 1 || counts.is_empty() {
            return Ok(counts);
        }
        let all = Tensor::side_by_side(&self.gpu, "tokens per expert", &counts.iter().collect::<Vec<_>>())?;
        let mut sums = all.to_u32(&self.gpu)?;
        reduce::all_reduce_u32(&*self.comm, &mut sums, Op::Sum)?;
        let (buffer, mut at) = all.memory();
        self.gpu.upload(buffer, at, bytemuck::cast_slice(&sums))?;
        for part in &counts {
            self.gpu.copy((buffer, at), part.memory(), part.bytes());
            at += part.bytes();
        }
        Ok(counts)
    }

    /// The whole parameters of a block, just gathered.
    fn gathered(&self, block: &mut Block) -> Result<Vec<Tensor>> {
        let (dtype, alone) = (self.policy.param_dtype, self.comm.size() == 1);
        let places = self.places(&block.members);
        let shapes = block.members.iter().map(|id| &self.table.spec(*id).shape);
        // The all-gather of one rank's f32 shards returns its input.
        let as_they_lie = (alone && dtype == DType::F32).then_some(&self.master);
        if let Some(store) = self.low.as_ref().or(as_they_lie) {
            if let Some(low) = &self.low {
                home::cast(&self.gpu, &self.master, low, &places)?;
            }
            return Ok(places.iter().zip(shapes).map(|(place, shape)| store.whole(place, shape)).collect());
        }
        let home = match block.home.take() {
            Some(home) => home,
            None => self.home(&block.members, dtype)?,
        };
        if alone {
            home.cast(&self.gpu, &self.master, &places, dtype)?;
        } else {
            self.gather(&block.members, &home, dtype)?;
        }
        let views = shapes.zip(&home.offsets);
        let views = views.map(|(shape, at)| Tensor::view(&home.buffer, *at, shape, dtype)).collect();
        block.home = Some(home);
        Ok(views)
    }

    /// Gathers a block: cast, all-gather straight into its home, and the hook that makes parameters of it.
    fn unshard(&self, block: &mut Block) -> Result<()> {
        let dtype = self.policy.param_dtype;
        let views = self.gathered(block)?;
        let mut kinds = Vec::new();
        block.params.clear();
        for (i, (id, view)) in block.members.iter().zip(views).enumerate() {
            let wrapped = self.policy.wrapped[id.0];
            let before = block.kinds.as_ref().map(|k| Unsharded { data: view.clone(), wrapped: k[i] });
            let name = &self.table.spec(*id).name;
            let param = hooks::post_all_gather(name, view, wrapped, dtype, before.as_ref())?;
            kinds.push(param.wrapped);
            block.params.push(param.data);
        }
        block.kinds = Some(kinds);
        block.live = true;
        Ok(())
    }

    fn places(&self, members: &[ParamId]) -> Vec<&Place> {
        members.iter().map(|id| self.layout.place(*id)).collect()
    }

    /// Memory for the whole parameters of a block.
    fn home(&self, members: &[ParamId], dtype: DType) -> Result<Home> {
        let sizes: Vec<u64> =
            members.iter().map(|id| quad_bytes(&self.table.spec(*id).shape, dtype)).collect();
        match self.comm.size() {
            1 => Home::like_shards(&self.gpu, &sizes, &self.places(members), dtype),
            _ => Home::new(&self.gpu, &sizes),
        }
    }

    /// Memory for the shards of `members` in `dtype`, each piece at a bindable offset.
    fn payload(&self, members: &[ParamId], dtype: DType) -> Result<Payload> {
        let sizes: Vec<u64> =
            members.iter().map(|id| quad_bytes(&[self.layout.place(*id).quads(), 4], dtype)).collect();
        let (offsets, total) = offsets(&sizes, self.gpu.caps().align);
        let buffer = self.gpu.alloc_shared("shards to gather", total)?;
        let pieces = members
            .iter()
            .zip(&offsets)
            .map(|(id, at)| Tensor::view(&buffer, *at, &[self.layout.place(*id).quads(), 4], dtype))
            .collect();
        Ok(Payload { buffer, pieces, offsets, sizes, total })
    }

    /// The exchange between hosts: cast the shards, download them, all-gather their exact bytes, upload whole parameters.
    fn gather(&self, members: &[ParamId], home: &Home, dtype: DType) -> Result<()> {
        let payload = self.payload(members, dtype)?;
        for (id, piece) in members.iter().zip(&payload.pieces) {
            hooks::pre_all_gather(&self.gpu, &self.master.shard(self.layout.place(*id)), piece)?;
        }
        let local = self.gpu.download(&payload.buffer, 0, payload.total)?;
        let mut send = Vec::new();
        for (at, size) in payload.offsets.iter().zip(&payload.sizes) {
            send.extend_from_slice(&local[*at as usize..(*at + *size) as usize]);
        }
        let mut recv = vec![0u8; send.len() * self.comm.size()];
        self.comm.all_gather(&send, &mut recv)?;
        let mut wire = self.wire.get();
        wire.gathered += send.len() as u64;
        self.wire.set(wire);
        let whole = self.assemble(members, home, &recv, dtype);
        self.gpu.upload(&home.buffer, 0, &whole)
    }

    /// Puts what every rank sent (its shards, one after another) together as whole parameters.
    fn assemble(&self, members: &[ParamId], home: &Home, recv: &[u8], dtype: DType) -> Vec<u8> {
        let mut whole = vec![0u8; home.total as usize];
        let share = recv.len() / self.comm.size();
        let mut from = 0;
        for (id, at) in members.iter().zip(&home.offsets) {
            let place = self.layout.place(*id);
            let unit = place.unit * dtype.quad_bytes();
            for rank in 0..self.comm.size() {
                let (lo, hi) = place.range(rank);
                let source = rank * share + from;
                let target = *at as usize + lo * unit;
                let bytes = (hi - lo) * unit;
                whole[target..target + bytes].copy_from_slice(&recv[source..source + bytes]);
            }
            from += place.chunk * unit;
        }
        whole
    }

    /// Reduces a block whose gradients are all there, and adds the mean to the shards.
    fn reduce(&self, gradients: Vec<(ParamId, Tensor)>) -> Result<()> {
        if self.comm.size() == 1 {
            for (id, gradient) in gradients {
                let target = self.grads.whole(self.layout.place(id), &self.table.spec(id).shape);
                // What was written into its home is there.
                if !gradient.is_same_memory(&target) {
                    self.land(&gradient, &target)?;
                }
            }
            return Ok(());
        }
        self.reduce_scatter(&gradients)
    }

    /// Adds to, or on the first pass of a step replaces, a gradient shard.
    fn land(&self, gradient: &Tensor, target: &Tensor) -> Result<()> {
        if self.accumulate.get() {
            elementwise::add_into(&self.gpu, target, gradient)
        } else {
            elementwise::cast_into(&self.gpu, gradient, target)
        }
    }

    fn reduce_scatter(&self, gradients: &[(ParamId, Tensor)]) -> Result<()> {
        let (world, dtype) = (self.comm.size(), self.policy.reduce_dtype);
        let sizes: Vec<u64> =
            gradients.iter().map(|(id, _)| quad_bytes(&self.table.spec(*id).shape, dtype)).collect();
        let (at, total) = offsets(&sizes, self.gpu.caps().align);
        let staging = self.gpu.alloc_shared("gradients to reduce", total)?;
        for ((id, gradient), at) in gradients.iter().zip(&at) {
            let target = Tensor::view(&staging, *at, &self.table.spec(*id).shape, dtype);
            elementwise::cast_into(&self.gpu, gradient, &target)?;
        }
        let bytes = self.gpu.download(&staging, 0, total)?;
        let mut send = Vec::new();
        for rank in 0..world {
            for ((id, _), at) in gradients.iter().zip(&at) {
                let place = self.layout.place(*id);
                let unit = place.unit * dtype.quad_bytes();
                let (lo, hi) = place.range(rank);
                let start = *at as usize;
                send.extend_from_slice(&bytes[start + lo * unit..start + hi * unit]);
                send.resize(send.len() + (place.chunk - (hi - lo)) * unit, 0);
            }
        }
        let mean = self.exchange(&send, dtype)?;
        self.land_shards(gradients, &mean)
    }

    /// Reduce-scatter (mean) of the ranks' blocks in `send`.
    fn exchange(&self, send: &[u8], dtype: DType) -> Result<Vec<f32>> {
        let mut mean = vec![0f32; send.len() / dtype.size() / self.comm.size()];
        if dtype == DType::F32 {
            let send: Vec<f32> = bytemuck::pod_collect_to_vec(send);
            reduce::reduce_scatter_f32(&*self.comm, &send, &mut mean, Op::Mean)?;
        } else {
            let send: Vec<half::bf16> = bytemuck::pod_collect_to_vec(send);
            reduce::reduce_scatter_bf16(&*self.comm, &send, &mut mean, Op::Mean)?;
        }
        let mut wire = self.wire.get();
        wire.reduced += send.len() as u64;
        self.wire.set(wire);
        Ok(mean)
    }

    fn land_shards(&self, gradients: &[(ParamId, Tensor)], mean: &[f32]) -> Result<()> {
        let ids: Vec<ParamId> = gradients.iter().map(|(id, _)| *id).collect();
        let payload = self.payload(&ids, DType::F32)?;
        let mut bytes = vec![0u8; payload.total as usize];
        let mut from = 0;
        for (at, size) in payload.offsets.iter().zip(&payload.sizes) {
            let n = *size as usize / 4;
            bytes[*at as usize..*at as usize + n * 4]
                .copy_from_slice(bytemuck::cast_slice(&mean[from..from + n]));
            from += n;
        }
        self.gpu.upload(&payload.buffer, 0, &bytes)?;
        for (id, piece) in ids.iter().zip(&payload.pieces) {
            self.land(piece, &self.grads.shard(self.layout.place(*id)))?;
        }
        Ok(())
    }
}

/// A block's shards in one buffer.
struct Payload {
    buffer: Arc<Buffer>,
    pieces: Vec<Tensor>,
    offsets: Vec<u64>,
    sizes: Vec<u64>,
    total: u64,
}

impl Weights for Fsdp {
    fn weight(&self, id: ParamId) -> Result<Tensor> {
        let block = self.table.spec(id).block;
        let mut blocks = self.blocks.borrow_mut();
        let block = &mut blocks[block];
        if !block.live {
            self.unshard(block)?;
        }
        let at = block.members.iter().position(|m| *m == id).expect("a parameter is in its block");
        Ok(block.params[at].clone())
    }

    /// The gradient's place in the store: where one rank holds it whole, in the compute dtype, and nothing is added to it.
    fn gradient_home(&self, ids: &[ParamId]) -> Result<Option<Tensor>> {
        let alike = self.grads.dtype() == self.policy.param_dtype;
        if self.comm.size() > 1 || self.accumulate.get() || !alike {
            return Ok(None);
        }
        let shape = &self.table.spec(ids[0]).shape;
        if ids.iter().any(|id| self.table.spec(*id).shape != *shape) {
            return Ok(None);
        }
        Ok(self.grads.side_by_side(&self.places(ids), shape))
    }

    fn gradient(&self, id: ParamId, gradient: Tensor) -> Result<()> {
        let spec = self.table.spec(id);
        assert_eq!(gradient.numel(), spec.numel(), "gradient {:?} of {}", gradient.shape(), spec.name);
        let mut blocks = self.blocks.borrow_mut();
        let block = &mut blocks[spec.block];
        block.gradients.push((id, gradient));
        if block.gradients.len() < block.members.len() {
            return Ok(());
        }
        let mut gradients = std::mem::take(&mut block.gradients);
        gradients.sort_by_key(|(id, _)| *id);
        drop(blocks);
        self.reduce(gradients)
    }

    fn leave(&self, block: usize) -> Result<()> {
        let last = self.table.blocks() - 1;
        let keep = !self.policy.reshard || (!self.backward.get() && block + 1 >= last);
        if !keep {
            let block = &mut self.blocks.borrow_mut()[block];
            block.live = false;
            block.home = None;
            block.params.clear();
        }
        Ok(())
    }
}
