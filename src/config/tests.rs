//! Whole configurations: precedence, aliases, refusals, warnings, checks, and the printed form.

use super::*;
use crate::Error;

fn words(overrides: &[&str]) -> Vec<String> {
    overrides.iter().map(ToString::to_string).collect()
}

fn load(toml: &str, overrides: &[&str]) -> Loaded {
    Config::from_toml(toml, "t.toml", &words(overrides)).unwrap()
}

/// The error's two sentences.
fn fails(toml: &str, overrides: &[&str]) -> (String, String) {
    match Config::from_toml(toml, "t.toml", &words(overrides)) {
        Err(Error::User { what, hint }) => (what, hint),
        other => panic!("{toml} {overrides:?}: {other:?}"),
    }
}

/// The keys of upstream's debug_model.toml of July 2025, with its values.
const DEBUG_TOML: &str = include_str!("../../configs/llama4_debug.toml");

#[test]
fn the_command_line_wins_over_the_file_and_the_file_over_defaults() {
    let c = load("[training]\nsteps = 7\nseq_len = 64\n", &["--training.steps=9"]).config;
    assert_eq!((c.training.steps, c.training.seq_len, c.training.local_batch_size), (9, 64, 8));
    assert_eq!(c.sources.of("training.steps"), Source::CommandLine);
    assert_eq!(c.sources.of("training.seq_len"), Source::File { line: 3 });
    assert_eq!(c.sources.of("training.local_batch_size"), Source::Default);
    assert_eq!((c.args.max_seq_len, c.args.dim), (64, 256));
    assert_eq!(c.sources.of("model.args.dim"), Source::Flavor);
    // The last of two equal overrides, as in argparse.
    assert_eq!(load("", &["training.steps=1", "training.steps=2"]).config.training.steps, 2);
    let file = "[model]\nconverters = [\"float8\"]\n";
    for (plain, of) in [(&[][..], 1), (&["model.converters=none"], 0), (&["model.converters="], 0)] {
        assert_eq!(load(file, plain).config.model.converters.len(), of, "{plain:?}");
    }
}

#[test]
fn args_override_the_flavor_whatever_the_order() {
    let toml = "[model.args]\ndim = 128\nn_kv_heads = 4\n[model]\nflavor = \"17bx16e\"\n";
    let c = load(toml, &["--model.args.ffn_dim_multiplier=none", "--model.args.score_func=sigmoid"]).config;
    assert_eq!((c.args.dim, c.args.n_kv_heads, c.args.n_layers), (128, Some(4), 48));
    assert_eq!((c.args.ffn_dim_multiplier, c.args.score_func), (None, ScoreFunc::Sigmoid));
    let c = load("", &["--model.args.top_k=2", "--model.flavor=debugmodel_irope"]).config;
    assert_eq!((c.args.top_k, c.args.every_n_layers_nope), (2, Some(4)));
}

#[test]
fn upstreams_debug_run_is_understood() {
    let l = load(
        DEBUG_TOML,
        &[
            "training.steps=10",
            "model.converters=float8",
            "float8.recipe_name=rowwise",
            "float8.moe_fqns_prototype=experts",
        ],
    );
    assert_eq!(l.warnings, [""; 0]);
    let c = l.config;
    c.validate(2).unwrap();
    assert_eq!((c.optimizer.lr, c.optimizer.eps, c.lr_scheduler.decay_ratio), (4e-3, 1e-15, Some(0.8)));
    assert_eq!(c.linear_recipe(), Some(Recipe::Rowwise));
    assert_eq!(c.moe_fqns(), ["experts"]);
    assert_eq!(c.float8.filter_fqns, ["output", "router.gate"]);
    // Without a recipe it is tensorwise; without the converter there is no fp8.
    assert_eq!(
        load(DEBUG_TOML, &["model.converters=float8"]).config.linear_recipe(),
        Some(Recipe::Tensorwise)
    );
    let off = load(DEBUG_TOML, &[]).config;
    assert_eq!((off.linear_recipe(), off.moe_fqns().len()), (None, 0));
}

#[test]
fn switches_may_be_bare_and_negated() {
    let on = load("", &["--training.deterministic", "--model.args.route_norm"]).config;
    assert!(on.training.deterministic && on.args.route_norm);
    for text in [
        "model.args.use_shared_expert=False",
        "model.args.no_use_shared_expert",
        "--model.args.no-use-shared-expert",
    ] {
        assert!(!load("", &[text]).config.args.use_shared_expert, "{text}");
    }
    assert!(fails("", &["--training.steps"]).0.contains("has no value"));
}

#[test]
fn other_names_are_accepted_and_contradictions_are_not() {
    let l = load("[float8]\nmoe_fqns = [\"experts\"]\n[training]\nbatch_size = 3\n", &[]);
    assert_eq!((l.config.float8.moe_fqns_prototype.len(), l.config.training.local_batch_size), (1, 3));
    assert!(l.warnings.iter().any(|w| w.starts_with("t.toml:2: float8.moe_fqns: ")), "{:?}", l.warnings);
    // Equal in another spelling is no contradiction; the command line wins over the file.
    load("[float8]\nmoe_fqns = \"experts\"\nmoe_fqns_prototype = [\"experts\"]\n", &[]);
    let c = load("[float8]\nmoe_fqns = \"experts\"\n", &["float8.moe_fqns_prototype=moe"]).config;
    assert_eq!(c.float8.moe_fqns_prototype, ["moe"]);
    let (what, _) = fails("[float8]\nmoe_fqns = \"experts\"\nmoe_fqns_prototype = [\"moe\"]\n", &[]);
    assert_eq!(
        what,
        "t.toml:2: float8.moe_fqns = \"experts\", but t.toml:3: float8.moe_fqns_prototype = [\"moe\"]"
    );
}

#[test]
fn ranges_are_of_keys() {
    for (path, lo, hi) in super::validate::RANGES {
        let at = super::keys::find(path).unwrap_or_else(|| panic!("{path} is no key"));
        assert_eq!(super::table::KEYS[at].limits(), Some((*lo, *hi)), "{path}");
    }
}

#[test]
fn errors_say_where_and_what_to_do() {
    let cases: &[(&str, &[&str], &str, &str)] = &[
        ("[training]\n\nstps = 1", &[], "t.toml:3: training.stps: unknown key", "training.steps"),
        ("steps = 1", &[], "t.toml:1: steps: unknown key", "training.steps"),
        ("[trainig]\n", &[], "t.toml:1: trainig: unknown key", "training"),
        ("[mx]\n", &[], "mx: unknown key", "no MXFP8"),
        ("[training]\nsteps = {}", &[], "expected a whole number from 1 to 1073741824", ""),
        ("[training]\nsteps = \"3\"", &[], "training.steps = \"3\": expected a whole number from 1", ""),
        (
            "[training]\nsteps = 99999999999999999999",
            &[],
            "a number beyond 64 bits",
            "between 1 and 1073741824",
        ),
        (
            "",
            &["training.steps=99999999999999999999"],
            "from 1 to 1073741824",
            "set training.steps to something between 1 and 1073741824",
        ),
        (
            "",
            &["lr_scheduler.warmup_steps=99999999999999999999"],
            "a whole number >= 0",
            "between 0 and 9223372036854775807",
        ),
        ("", &["metrics.log_freq=-1"], "a whole number >= 1", "between 1 and 9223372036854775807"),
        ("", &["model.args.every_n_layers_nope=-2"], "from 2 to 65536, or \"none\"", "between 2 and 65536"),
        ("[training]\nsteps = 1\nsteps = 2", &[], "t.toml:3: ", "toml.io"),
        ("[training\nsteps = 1", &[], "t.toml:1: ", "toml.io"),
        (
            "[training]\ndataset = \"c4_test\"",
            &[],
            "t.toml:2: training.dataset = \"c4_test\"",
            "\"synthetic\"",
        ),
        ("", &["training.dataset=jsnl"], "--training.dataset = \"jsnl\"", "did you mean \"jsonl\"?"),
        ("", &["float8.recipe_name=rowise"], "tensorwise | rowwise", "did you mean \"rowwise\"?"),
        ("", &["model.flavor=17bx16"], "model.flavor", "\"17bx16e\""),
        ("", &["training.steps=-1"], "expected a whole number from 1 to 1073741824", "between 1 and"),
        ("", &["model.converter=float8"], "--model.converter: unknown key", "model.converters"),
        ("", &["job.config_file=x"], "unknown key", "--config FILE"),
        ("", &["="], "unknown key", "--keys"),
        ("", &["parallelism.tensor_parallel_degree=2"], "takes only 1", "data-parallel"),
        ("", &["checkpoint.enable_checkpoint"], "takes only false", "moe8 export"),
        ("", &["float8.enable_fsdp_float8_all_gather=true"], "takes only false", ""),
        ("[training]\nmixed_precision_reduce = \"bfloat16\"", &[], "(file, line 2)", "float32"),
    ];
    for (toml, overrides, what, hint) in cases {
        let (w, h) = fails(toml, overrides);
        assert!(w.contains(what) && h.contains(hint), "{toml} {overrides:?}:\n{w}\n{h}");
        assert!(!w.is_empty() && !h.is_empty());
    }
}

#[test]
fn what_has_no_effect_is_said() {
    for (overrides, warning) in [
        (&["training.compile"][..], "training.compile = true (command line) has no effect"),
        (&["profiling.enable_profiling=true"], "profiling.enable_profiling = true"),
        (&["activation_checkpoint.mode=full"], "activation_checkpoint.mode = \"full\""),
        (
            &["float8.recipe_name=rowwise"],
            "float8.recipe_name = \"rowwise\" (command line) has no effect while model.converters = []",
        ),
        (&["training.steps=10"], "lr_scheduler.warmup_steps = 200, training.steps = 10"),
    ] {
        let found = load("", overrides).warnings;
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with(warning), "{found:?}");
    }
    assert_eq!(
        load("[training]\ncompile = false\n", &["float8.recipe_name=rowwise", "model.converters=float8"])
            .warnings,
        [""; 0]
    );
}

/// An override of the debug model that [`Config::validate`] refuses on one rank, and a word of its message.
const IMPOSSIBLE: &[(&str, &str)] = &[
    ("training.seq_len=0", "training.seq_len"),
    ("training.local_batch_size=0", "training.local_batch_size"),
    ("training.steps=0", "training.steps"),
    ("training.max_norm=nan", "training.max_norm"),
    ("training.max_norm=0", "training.max_norm"),
    ("training.global_batch_size=0", "global_batch_size"),
    ("training.global_batch_size=-2", "global_batch_size"),
    ("training.global_batch_size=12", "multiple of 8"),
    ("training.dataset=text", "needs a file"),
    ("training.dataset_path=a", "synthetic"),
    ("metrics.log_freq=0", "metrics.log_freq"),
    ("optimizer.lr=0", "optimizer.lr"),
    ("optimizer.lr=nan", "optimizer.lr"),
    ("optimizer.lr=inf", "optimizer.lr"),
    ("optimizer.beta1=1", "optimizer.beta1"),
    ("optimizer.beta2=-0.1", "optimizer.beta2"),
    ("optimizer.eps=-1", "optimizer.eps"),
    ("optimizer.weight_decay=nan", "optimizer.weight_decay"),
    ("lr_scheduler.decay_ratio=1.1", "decay_ratio"),
    ("lr_scheduler.lr_min=2", "lr_min"),
    ("parallelism.data_parallel_shard_degree=2", "there are 1 ranks"),
    ("parallelism.data_parallel_shard_degree=0", "shard_degree = 0"),
    ("model.converters=mx", "mx"),
    ("model.args.dim=0", "dim"),
    ("model.args.dim=250", "n_heads"),
    ("model.args.n_heads=128", "2 elements per head"),
    ("model.args.n_heads=0", "n_heads"),
    ("model.args.n_layers=0", "n_layers"),
    ("model.args.n_kv_heads=3", "n_kv_heads"),
    ("model.args.n_kv_heads=0", "n_kv_heads"),
    ("model.args.n_kv_heads=32", "n_kv_heads"),
    ("model.args.vocab_size=0", "vocab_size"),
    ("model.args.eos_id=2256", "eos_id"),
    ("model.args.multiple_of=0", "multiple_of"),
    ("model.args.ffn_dim_multiplier=nan", "ffn_dim_multiplier"),
    ("model.args.ffn_dim_multiplier=0.0001", "hidden width of 0"),
    ("model.args.rope_theta=0", "rope_theta"),
    ("model.args.norm_eps=-1", "norm_eps"),
    ("model.args.max_seq_len=100", "max_seq_len"),
    ("model.args.num_experts=0", "num_experts"),
    ("model.args.top_k=0", "top_k"),
    ("model.args.top_k=9", "num_experts = 8"),
    ("model.args.interleave_moe_layer_step=0", "interleave"),
    ("model.args.every_n_layers_nope=1", "nope"),
    ("model.args.fixed_attn_block_size=0", "fixed_attn_block_size"),
    ("model.args.route_scale=inf", "route_scale"),
    ("model.args.load_balance_coeff=-1", "load_balance_coeff"),
    ("model.args.n_layers=9223372036854775807", "n_layers"),
];

#[test]
fn impossible_numbers_are_refused() {
    for (overrides, word) in IMPOSSIBLE {
        let error = load("", &[*overrides]).config.validate(1).expect_err(overrides).to_string();
        assert!(error.contains(*word) && error.contains("hint: "), "{overrides}: {error}");
    }
    assert!(Config::default().validate(0).is_err());
    let wide = ["training.local_batch_size=60000", "training.seq_len=60000"];
    assert!(load("", &wide).config.validate(1).unwrap_err().to_string().contains("tokens are more"));
    let huge = ["model.args.dim=1048576", "model.args.n_layers=60000", "model.args.num_experts=60000"];
    assert!(load("", &huge).config.validate(1).unwrap_err().to_string().contains("parameters"));
    let fp8 = ["model.converters=float8", "float8.moe_fqns=experts", "model.args.use_grouped_mm=false"];
    assert!(load("", &fp8).config.validate(1).unwrap_err().to_string().contains("use_grouped_mm"));
}

#[test]
fn gradients_accumulate_over_whole_passes() {
    for (global, dp, steps) in [(-1, 3, 1), (8, 1, 1), (24, 3, 1), (48, 3, 2), (40, 1, 5)] {
        let c = load("", &[&format!("training.global_batch_size={global}")]).config;
        assert_eq!(c.accumulation_steps(dp).unwrap(), steps);
        c.validate(dp).unwrap();
    }
    assert!(load("", &["training.global_batch_size=24"]).config.accumulation_steps(2).is_err());
}

#[test]
fn the_printed_form_reads_back() {
    let configs = [
        load("", &[]).config,
        load(DEBUG_TOML, &["model.args.n_kv_heads=4", "training.seed=3", "job.description=a \"b\"\\"]).config,
        load("", &["model.flavor=17bx128e_irope", "training.max_norm=inf", "lr_scheduler.decay_ratio=none"])
            .config,
    ];
    for config in configs {
        let text = config.to_toml();
        let mut again = load(&text, &[]).config;
        again.sources = config.sources.clone();
        assert_eq!(again, config, "{text}");
    }
}

#[test]
fn the_goldens_can_be_written() {
    // `args` of golden/tiny_irope.json and tiny_top2.json; the hidden widths stand in their tensor shapes.
    let tiny = "[model.args]\ndim = 64\nn_heads = 4\nn_kv_heads = 2\nvocab_size = 256\nmultiple_of = 32\n\
        ffn_dim_multiplier = \"none\"\nnorm_eps = 1e-05\nrope_theta = 500000\nmax_seq_len = 48\ndepth_init = true\n\
        use_flex_attn = false\nattn_mask_type = \"causal\"\neos_id = 0\nmoe_enabled = true\nuse_shared_expert = true\n\
        auto_scale_hidden_dim = true\ninterleave_moe_layer_step = 2\nuse_grouped_mm = false\nload_balance_coeff = 0.001\n\
        [training]\nseq_len = 48\nlocal_batch_size = 2\nmixed_precision_param = \"float32\"\n";
    let of = |overrides: &[&str]| {
        let c = load(tiny, overrides).config;
        c.validate(1).unwrap();
        c.args
    };
    let top1 = of(&["model.args.n_layers=2", "model.args.num_experts=4"]);
    assert_eq!((top1.dense_hidden(), top1.expert_hidden(), top1.counts().total()), (192, 96, 186_944));
    let top2 = of(&["model.args.n_layers=2", "model.args.num_experts=6", "model.args.top_k=2"]);
    assert_eq!((top2.expert_hidden(), top2.counts().total()), (64, 180_928));
    let irope = of(&[
        "model.args.n_layers=4",
        "model.args.num_experts=4",
        "model.args.every_n_layers_nope=4",
        "model.args.fixed_attn_block_size=16",
    ]);
    assert_eq!([0, 1, 2, 3].map(|i| irope.attn_block(i)), [None, Some(16), Some(16), Some(16)]);
}

#[test]
fn shipped_files_are_valid_and_quiet() {
    for (name, text) in [
        ("quickstart", include_str!("../../configs/quickstart.toml")),
        ("llama4_debug", DEBUG_TOML),
        ("llama4_17bx16e", include_str!("../../configs/llama4_17bx16e.toml")),
        ("llama4_17bx128e", include_str!("../../configs/llama4_17bx128e.toml")),
    ] {
        let l = load(text, &[]);
        l.config.validate(2).unwrap();
        assert_eq!(l.warnings, [""; 0], "{name}");
    }
}
