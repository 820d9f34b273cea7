//! What a user can get wrong, through the real program: each ends with exit code 2, says what is wrong and what to do,
//! and leaves no half-written file. Errors of the configuration alone are in `cli.rs` and the library's own tests.

#[path = "common/program.rs"]
mod program;

use moe8::comm::{Communicator, Solo};
use moe8::config::Config;
use moe8::gpu::{DeviceChoice, Gpu, Options, list_adapters};
use moe8::train::run;
use program::{command, names, stderr, succeed};
use std::path::Path;
use std::process::Output;
use std::sync::Arc;

/// Fails unless `out` is an orderly refusal with all of `wanted` on standard error.
fn refused(what: &str, out: &Output, wanted: &[&str]) {
    let text = stderr(out);
    assert_eq!(out.status.code(), Some(2), "{what}\n{text}");
    for word in wanted.iter().chain(&["error: ", "hint: "]) {
        assert!(text.contains(word), "{what}: no {word:?} in\n{text}");
    }
    assert!(!text.contains("panicked") && !text.contains("RUST_BACKTRACE"), "{what}\n{text}");
    let errors = text.lines().filter(|line| line.starts_with("error: ")).count();
    assert_eq!(errors, 1, "{what}: the error is said once\n{text}");
}

fn run_refused(line: &str, env: &[(&str, &str)], wanted: &[&str]) {
    refused(line, &command(line, env).output().expect("the program starts"), wanted);
}

/// Trains the small model into a fresh folder; the refusal must leave nothing there.
fn train_refused(rest: &str, wanted: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    run_refused(&format!("train SMALL --job.dump_folder={}/out {rest}", dir.path().display()), &[], wanted);
    assert_eq!(names(dir.path()), [""; 0], "{rest}");
}

/// A file in `dir`, as the word of a command line.
fn file(dir: &Path, name: &str, bytes: &[u8]) -> String {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path.display().to_string()
}

#[test]
fn no_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let empty = file(dir.path(), "empty.json", b"");
    for driver in ["/no/such/driver.json", &empty] {
        let env = [("VK_DRIVER_FILES", driver), ("VK_ICD_FILENAMES", driver), ("WGPU_BACKEND", "vulkan")];
        let out = dir.path().join("out");
        for line in [
            format!("train SMALL --job.dump_folder={}", out.display()),
            format!("export SMALL --output {}", out.display()),
            "devices".into(),
        ] {
            run_refused(&line, &env, &["no GPU adapter found", "scripts/setup.sh"]);
            assert!(!out.exists(), "{line}");
        }
    }
}

/// The variable that hides adapters is named, with its value and the others that there are.
#[test]
fn a_backend_that_is_not_here() {
    for backend in [if cfg!(target_os = "macos") { "dx12" } else { "metal" }, "vulcan", ""] {
        let wanted = format!("no GPU adapter found with WGPU_BACKEND = {backend:?}");
        for line in ["devices", "selftest"] {
            run_refused(
                line,
                &[("WGPU_BACKEND", backend)],
                &[&wanted, "unset WGPU_BACKEND", "vulkan, metal, dx12 and gl"],
            );
        }
    }
}

#[test]
fn a_cache_that_is_no_folder() {
    let dir = tempfile::tempdir().unwrap();
    let plain = file(dir.path(), "plain", b"a file");
    for (folder, wanted) in [
        (plain.clone(), format!("MOE8_CACHE = {plain} is no folder")),
        (format!("{plain}/in"), format!("MOE8_CACHE = {plain}/in: {plain} is no folder")),
    ] {
        let env = [("MOE8_CACHE", folder.as_str())];
        run_refused("tune", &env, &[&wanted, "set MOE8_CACHE to a folder", "`off`"]);
        // This opens the adapter and has nothing else to do.
        let out =
            command("selftest --kernel narrow --only attention", &env).output().expect("the program starts");
        let text = stderr(&out);
        assert!(text.contains("nothing to test"), "a run goes on without: {text}");
        assert_eq!(text.matches(&wanted).count(), 1, "{text}");
        assert!(!text.contains("damaged"), "{text}");
    }
}

#[test]
fn an_adapter_that_is_not_there() {
    train_refused("--device no-such-adapter", &["no adapter fits \"no-such-adapter\"", "moe8 devices"]);
    train_refused("--device 99", &["no adapter fits number 99", "moe8 devices"]);
    run_refused("devices --device 99", &[], &["no adapter fits number 99", "of this list"]);
    run_refused("selftest --kernel narrow --only attention", &[], &["nothing to test", "--kernel"]);
}

/// Keys and options that would do nothing, of the subcommands that read no configuration.
#[test]
fn what_a_subcommand_does_not_have() {
    let unknown = ["--training.step: unknown key", "did you mean training.steps?"];
    for command in ["devices", "selftest", "tune", "compare a.json b.json"] {
        run_refused(&format!("{command} --training.step=1"), &[], &unknown);
        let known = format!("--training.steps=1 is not for `moe8 {}`", command.split(' ').next().unwrap());
        run_refused(&format!("{command} --training.steps=1"), &[], &[&known, "no configuration is read"]);
    }
    run_refused("tune --model.foo=x", &[], &["--model.foo: unknown key"]);
    let none = ["--config configs/quickstart.toml", "--ranks 2", "--check-nan", "--explain"];
    let kernels = ["--kernel tiled", "--no-coop"];
    for (command, options) in [
        ("devices", [&none[..], &kernels, &["--safe-shaders"]].concat()),
        ("selftest", none.to_vec()),
        ("tune", [&none[..], &kernels].concat()),
    ] {
        for option in options {
            let name = option.split(' ').next().unwrap();
            let wanted = format!("{name} is not for `moe8 {command}`");
            run_refused(&format!("{command} {option}"), &[], &[&wanted]);
        }
    }
    succeed("devices --ranks 1");
}

#[test]
fn a_tensor_over_the_binding_limit() {
    let all = list_adapters();
    let chosen = &all[DeviceChoice::from_env().pick(&all).expect("an adapter")];
    let limit = chosen.caps.max_binding.min(chosen.caps.max_buffer);
    let vocab = limit / (256 * 4) + 1;
    train_refused(
        &format!("--model.args.dim=256 --model.args.vocab_size={vocab}"),
        &[
            "tok_embeddings.weight",
            &format!("[{vocab}, 256]"),
            &(vocab * 256 * 4).to_string(),
            &format!("limit of {limit} bytes"),
            "vocab_size",
            "moe8 devices",
        ],
    );
}

/// Weights and activations, each first to be over a small limit: named by the plan, before anything is allocated.
#[test]
fn a_tensor_over_a_smaller_binding_limit() {
    let gpu = |limit| {
        let options = Options { max_binding: Some(limit), ..Options::default() };
        Gpu::open_with(&DeviceChoice::from_env(), options).expect("an adapter")
    };
    let plan = |gpu: &Gpu, rest: &str| {
        let line = program::words(&format!("SMALL {rest}"));
        let overrides = moe8::cli::overrides::split(line.into_iter().skip(2)).1;
        let config = Config::load(Some(Path::new("configs/quickstart.toml")), &overrides).expect("good keys");
        let (_, args) = run::open_data(&config.config).expect("data");
        let comm: Arc<dyn Communicator> = Arc::new(Solo::new());
        run::plan(&config.config, gpu, &comm, &args)
    };
    let small = gpu(1 << 20);
    assert!(plan(&small, "").expect("all tensors fit").memory() > 0);
    for (rest, wanted) in [
        ("--model.args.vocab_size=8193", &["parameter tok_embeddings.weight [8193, 32]", "vocab_size"][..]),
        ("--model.args.num_experts=400", &["layers.1.moe.experts.w1", "num_experts"]),
        ("--training.local_batch_size=600", &["tensor ", "training.local_batch_size"]),
        ("--training.seq_len=20000", &["tensor ", "training.seq_len"]),
    ] {
        let error = plan(&small, rest).expect_err(rest).to_string();
        for word in wanted.iter().chain(&["limit of 1048576 bytes", "hint: ", "moe8 devices"]) {
            assert!(error.contains(word), "{rest}: no {word:?} in\n{error}");
        }
    }
    assert_eq!(small.memory(), 0, "nothing was allocated");
}

#[test]
fn data_files() {
    let dir = tempfile::tempdir().unwrap();
    let mut ids: Vec<u8> = (0..4000u16).flat_map(|i| (i % 100).to_le_bytes()).collect();
    let good = file(dir.path(), "good.u16", &ids);
    let odd = file(dir.path(), "odd.u16", &ids[..ids.len() - 1]);
    let short = file(dir.path(), "short.u16", &ids[..64]);
    ids[2 * 1234..2 * 1235].copy_from_slice(&128u16.to_le_bytes());
    let high = file(dir.path(), "high.u16", &ids);
    let lines = file(dir.path(), "lines.jsonl", b"{\"text\": \"one\"}\n{\"text\": 2}\n");
    let binary = file(dir.path(), "binary.txt", b"good \xff bad");
    let missing = format!("{}/missing.u16", dir.path().display());
    for (kind, path, wanted) in [
        ("tokens", missing.as_str(), &["missing.u16: No such file", "training.dataset_path"][..]),
        ("tokens", &odd, &["odd.u16", "7999"]),
        ("tokens", &short, &["32 tokens", "seq_len + 1 = 33", "training.seq_len"]),
        ("tokens", &high, &["token id 128 at position 1234", "128", "model.args.vocab_size"]),
        ("jsonl", &missing, &["missing.u16: No such file"]),
        ("jsonl", &lines, &["lines.jsonl:2:"]),
        ("text", &binary, &["binary.txt: byte 5 is not UTF-8"]),
        ("text", "/dev/null", &["no documents"]),
    ] {
        train_refused(&format!("--training.dataset={kind} --training.dataset_path={path}"), wanted);
    }
    train_refused("--training.dataset=tokens", &["training.dataset_path"]);
    train_refused("--model.tokenizer_path=no/such/tokenizer.json", &["no/such/tokenizer.json"]);
    // On several ranks the error is said once as well.
    train_refused(&format!("--ranks 2 --training.dataset=tokens --training.dataset_path={missing}"), &[]);
    let out = dir.path().join("out");
    succeed(&format!(
        "train SMALL --training.steps=1 --job.dump_folder={} --training.dataset=tokens --training.dataset_path={good}",
        out.display()
    ));
}

#[test]
fn weight_files() {
    let dir = tempfile::tempdir().unwrap();
    let good = dir.path().join("good.safetensors");
    succeed(&format!("export SMALL --output {}", good.display()));
    let bytes = std::fs::read(&good).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let renamed =
        String::from_utf8_lossy(&bytes[..header]).replace("layers.0.attention.wq", "layers.0.attention.wx");
    let mut renamed = renamed.into_bytes();
    renamed.extend(&bytes[header..]);
    for (name, bytes, rest, wanted) in [
        ("body", &bytes[..bytes.len() - 1], "", &["cut short", "the header promises"][..]),
        ("header", &bytes[..header - 3], "", &["cut short"]),
        ("start", &bytes[..5], "", &["5 bytes are no safetensors file"]),
        ("other", b"PK\x03\x04 and so on", "", &["PyTorch archive", "safetensors.torch"]),
        ("text", b"this is a file of some text", "", &["no safetensors file"]),
        ("renamed", &renamed, "", &["missing layers.0.attention.wq", "extra layers.0.attention.wx"]),
        (
            "size",
            &bytes,
            "--model.args.vocab_size=130",
            &["misshapen output.weight", "[130, 32]", "[128, 32]"],
        ),
    ] {
        let path = file(dir.path(), &format!("{name}.safetensors"), bytes);
        let load = format!("--checkpoint.initial_load_path={path} {rest}");
        train_refused(&load, &[&[name, "hint: "], wanted].concat());
        let output = dir.path().join("again.safetensors");
        run_refused(&format!("export SMALL {load} --output {}", output.display()), &[], wanted);
        assert!(!output.exists());
    }
    train_refused(
        "--checkpoint.initial_load_path=no/such.safetensors",
        &["no/such.safetensors: No such file"],
    );
    train_refused("--checkpoint.initial_load_path=src", &["src: this is no file"]);
}

#[test]
fn numbers_that_do_not_fit() {
    for (rest, wanted) in [
        ("--training.seq_len=0", &["training.seq_len = 0"][..]),
        ("--training.local_batch_size=0", &["training.local_batch_size = 0"]),
        ("--training.steps=0", &["training.steps = 0"]),
        ("--model.args.dim=0", &["model.args.dim = 0"]),
        ("--model.args.top_k=5", &["top_k = 5", "num_experts = 4"]),
        ("--model.args.n_heads=3", &["dim = 32", "n_heads = 3"]),
        ("--model.args.n_heads=16", &["2 elements per head"]),
        ("--model.args.dim=512", &["head", "256"]),
        ("--optimizer.eps=0", &["optimizer.eps = 0"]),
        ("--optimizer.eps=1e-60", &["optimizer.eps = 1e-60"]),
        ("--optimizer.beta2=0.9999999999", &["optimizer.beta2"]),
        ("--ranks 3 --training.global_batch_size=8", &["global_batch_size = 8", "3 ranks"]),
        (
            "--ranks 3 --parallelism.data_parallel_shard_degree=2",
            &["data_parallel_shard_degree = 2", "3 ranks"],
        ),
        ("--ranks 0", &["ranks"]),
        ("--ranks 2 --device no-such-adapter", &["no-such-adapter"]),
    ] {
        train_refused(rest, wanted);
    }
}

#[test]
#[cfg(not(feature = "mpi"))]
fn mpi_that_was_not_built() {
    let dir = tempfile::tempdir().unwrap();
    let env = [("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "1")];
    for rest in ["", "--ranks 2"] {
        let line = format!("train SMALL --job.dump_folder={}/out {rest}", dir.path().display());
        run_refused(&line, &env, &["MPI asked for but not built", "--features mpi"]);
    }
    let line = format!("train SMALL --job.dump_folder={}/out --ranks 3", dir.path().display());
    run_refused(&line, &env, &["3 ranks asked for, but the MPI launcher started 2"]);
    assert_eq!(names(dir.path()), [""; 0]);
}

#[test]
fn places_that_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let plain = file(dir.path(), "plain", b"a file");
    run_refused(&format!("train SMALL --job.dump_folder={plain}/out"), &[], &["plain", "job.dump_folder"]);
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    // As with `moe8 bench`: a folder that is not there is more likely a slip than a wish.
    let missing = folder.join("a/b/x.safetensors");
    for (output, wanted) in [
        (format!("{plain}/x.safetensors"), "plain is no folder"),
        (missing.display().to_string(), "a/b is no folder"),
        (folder.display().to_string(), "folder is a folder"),
    ] {
        let line = format!("export SMALL --output {output}");
        run_refused(&line, &[], &[wanted, "name a file in a folder that exists"]);
    }
    assert_eq!(names(dir.path()), ["folder", "plain"]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_disk_that_fills_while_metrics_are_written() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/dev/full", dir.path().join("metrics.jsonl")).unwrap();
    for ranks in ["", "--ranks 2"] {
        let line = format!("train SMALL --job.dump_folder={} {ranks}", dir.path().display());
        run_refused(&line, &[], &["metrics.jsonl: No space left on device", "free some space"]);
    }
    assert_eq!(names(dir.path()), ["metrics.jsonl"]);
    run_refused("export SMALL --output /dev/full", &[], &["/dev/full exists and is not a regular file"]);
}

/// On a small file system of its own, where this machine lets a user have one; `train/weights/save.rs` has a unit test
/// of a disk that is full after any number of bytes.
#[test]
#[cfg(target_os = "linux")]
fn a_disk_that_fills_while_weights_are_written() {
    const SCRIPT: &str =
        "mount -t tmpfs -o size=64k none \"$1\" || exit 77; cd \"$1\" && echo old >w.safetensors || exit 77
        shift; (cd \"$OLDPWD\" && \"$@\"); code=$?; ls -A; cat w.safetensors; exit $code";
    let dir = tempfile::tempdir().unwrap();
    let export = command(&format!("export SMALL --output {}/w.safetensors", dir.path().display()), &[]);
    let out = std::process::Command::new("unshare")
        .args(["--map-root-user", "--mount", "sh", "-c", SCRIPT, "sh"])
        .arg(dir.path())
        .arg(export.get_program())
        .args(export.get_args())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    let out = match out {
        Ok(out) if out.status.code() != Some(77) && !stderr(&out).starts_with("unshare:") => out,
        other => return eprintln!("no file system of one's own here: {other:?}"),
    };
    refused(
        "export to a small disk",
        &out,
        &["w.safetensors: No space left", "nothing was left half-written"],
    );
    assert_eq!(String::from_utf8_lossy(&out.stdout), "w.safetensors\nold\n");
}

/// Not an error, since upstream ignores them: names that fit no module.
#[test]
fn names_that_fit_no_module_are_warned_of_once() {
    let dir = tempfile::tempdir().unwrap();
    let out = succeed(&format!(
        "train SMALL --ranks 2 --training.steps=1 --job.dump_folder={} --float8.moe_fqns_prototype=expurts \
         --float8.filter_fqns=outputs,router.gate",
        dir.path().display()
    ));
    let text = stderr(&out);
    for line in [
        "WARNING - float8.moe_fqns_prototype has \"expurts\", which is in the name of no experts module; the nearest: \
         layers.1.moe.experts, ",
        "WARNING - float8.filter_fqns has \"outputs\", which is in the name of no linear; the nearest: output, ",
    ] {
        assert_eq!(text.matches(line).count(), 1, "{line}\n{text}");
    }
    assert!(!text.contains("router.gate\", which"), "{text}");
}

/// Not an error either: nothing in fp8, with the reason.
#[test]
fn a_model_without_fp8_says_why() {
    let none = "off: model.converters = []";
    let unfit = "nothing converted: float8.moe_fqns_prototype = [] names no experts, and each linear is in \
                 float8.filter_fqns = [\"attention\", ";
    for (rest, why) in [
        ("--model.converters=none", none),
        ("--float8.moe_fqns_prototype=[] --float8.filter_fqns=attention,feed_forward,moe,output", unfit),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let line =
            format!("train SMALL --training.steps=1 --job.dump_folder={} {rest}", dir.path().display());
        let text = stderr(&succeed(&line));
        assert_eq!(text.matches(&format!("float8: {why}")).count(), 1, "{rest}\n{text}");
    }
}

#[test]
fn ranks_that_one_process_cannot_have() {
    train_refused(
        "--ranks 1000",
        &["1000 ranks as threads", "each, ", "in all", "at most 128", "mpirun -n 1000"],
    );
}

/// The run goes on, as upstream's does, and leaves its metrics; its end is no success.
#[test]
fn a_loss_that_is_no_number() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!(
        "train SMALL --job.dump_folder={} --training.steps=4 --metrics.log_freq=1 --optimizer.lr=1e30 --ranks 2",
        dir.path().display()
    );
    let out = command(&line, &[]).output().expect("the program starts");
    refused(&line, &out, &["all 4 steps are done, but the loss is no number since step", "optimizer.lr"]);
    assert!(!stderr(&out).contains("Training completed"), "no success, so no word of one: {}", stderr(&out));
    assert_eq!(stderr(&out).matches("training goes on").count(), 1, "{}", stderr(&out));
    let metrics = std::fs::read_to_string(dir.path().join("metrics.jsonl")).expect("metrics");
    assert_eq!(metrics.lines().count(), 4);
}

/// Of processes that come to the same error the first one ends the others before they repeat it.
#[test]
fn an_error_of_all_processes_is_said_once() {
    let launched = |rank: &str| {
        let env = [("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", rank)];
        let start = std::time::Instant::now();
        let out = command("train --config no/such.toml", &env).output().expect("the program starts");
        (stderr(&out), start.elapsed())
    };
    let ((first, _), (second, waited)) = (launched("0"), launched("1"));
    assert!(first.contains("no/such.toml") && first.contains("on rank 0"), "{first}");
    assert!(second.contains("on rank 1") && waited.as_secs_f64() > 1.0, "{second}");
}
