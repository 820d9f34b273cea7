//! The shell scripts: their plan on made-up machines, and the command lines they put together. Nothing is installed.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const REPO: &str = env!("CARGO_MANIFEST_DIR");
const DEBIAN_12: &str = "ID=debian\nVERSION_ID=\"12\"\nVERSION_CODENAME=bookworm\n";
const DEBIAN_SOURCES: &str = "Types: deb deb-src\n# a comment\nURIs: http://mirror.example/debian\n\
    Suites: bookworm bookworm-updates\nComponents: main contrib\nSigned-By: /usr/share/keyrings/k.gpg\n\n\
    Types: deb\nURIs: http://mirror.example/debian-security\nSuites: bookworm-security\nComponents: main\n";

/// A folder that stands for `/`.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new(os_release: &str) -> Machine {
        let machine = Machine(tempfile::tempdir().unwrap());
        machine.file("etc/os-release", os_release);
        machine
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn executable(&self, path: &str, text: &str) {
        self.file(path, text);
        fs::set_permissions(self.root().join(path), fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn programs(&self, names: &[&str]) {
        for name in names {
            self.executable(&format!("usr/bin/{name}"), "");
        }
    }

    /// Everything that a build with MPI needs.
    fn mpi(&self) {
        self.programs(&["mpicc", "mpirun"]);
        self.file("usr/lib/llvm-14/lib/libclang.so.1", "");
        self.file("usr/lib/llvm-14/lib/clang/14/include/stddef.h", "");
    }

    fn nvidia(&self) {
        self.file("usr/share/vulkan/icd.d/nvidia_icd.json", "{}");
        self.file("dev/nvidia0", "");
    }

    /// A script of the repository on this machine, without what the caller's environment says to scripts.
    fn command(&self, script: &str) -> Command {
        let mut command = Command::new("bash");
        command.arg(Path::new(REPO).join(script)).env("MOE8_ROOT", self.root()).current_dir(REPO);
        let names = "MOE8_MPI MOE8_OS_RELEASE MOE8_NO_INSTALL MOE8_DRY_RUN NGPU LOG_RANK CONFIG_FILE MPICC MPIRUN \
                     LP_NUM_THREADS LIBCLANG_PATH CARGO_TARGET_DIR VK_DRIVER_FILES VK_ICD_FILENAMES";
        for name in names.split_whitespace() {
            command.env_remove(name);
        }
        command
    }

    fn plan(&self) -> String {
        let before = self.files();
        let out = self.command("scripts/setup.sh").arg("--dry-run").output().unwrap();
        assert!(out.status.success(), "{}", text(&out));
        assert_eq!(before, self.files(), "a dry run changes nothing");
        text(&out).replace("sudo ", "")
    }

    fn files(&self) -> Vec<PathBuf> {
        let (mut found, mut folders) = (Vec::new(), vec![self.root().to_path_buf()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { folders.push(path) } else { found.push(path) }
            }
        }
        found.sort();
        found
    }
}

fn text(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

#[test]
fn scripts_parse() {
    for script in [
        "run_train.sh",
        "run_tests.sh",
        "scripts/lib.sh",
        "scripts/setup.sh",
        "scripts/features.sh",
        ".ci/run",
    ] {
        let out = Command::new("bash").arg("-n").arg(Path::new(REPO).join(script)).output().unwrap();
        assert!(out.status.success(), "{script}: {}", text(&out));
    }
}

#[test]
fn bare_machines_get_the_commands_of_their_family() {
    let vulkan = "apt-get install -y --no-install-recommends libvulkan1 mesa-vulkan-drivers\n";
    let mpi = "apt-get install -y --no-install-recommends openmpi-bin libopenmpi-dev libclang-dev\n";
    let table = [
        ("ID=debian\nVERSION_ID=13\nVERSION_CODENAME=trixie\n", vulkan),
        ("ID=ubuntu\nID_LIKE=debian\nVERSION_ID=\"24.04\"\n", vulkan),
        ("ID=linuxmint\nID_LIKE='ubuntu debian'\n", mpi),
        (
            "ID=fedora\n",
            "dnf install gcc pkgconf-pkg-config vulkan-loader mesa-vulkan-drivers openmpi openmpi-devel clang-devel\n",
        ),
        ("ID=rocky\nID_LIKE=\"rhel centos fedora\"\n", "dnf install gcc"),
        ("ID=arch\n", "pacman -S --needed gcc pkgconf vulkan-icd-loader vulkan-swrast openmpi clang\n"),
        (
            "ID=\"opensuse-tumbleweed\"\nID_LIKE=\"opensuse suse\"\n",
            "zypper install gcc pkg-config libvulkan1 libvulkan_lvp openmpi4 openmpi4-devel clang-devel\n",
        ),
        (
            "ID=alpine\n",
            "apk add build-base pkgconf vulkan-loader mesa-vulkan-swrast openmpi openmpi-dev clang clang-libclang\n",
        ),
        ("ID=macos\n", "xcode-select --install\nbrew install open-mpi llvm\n"),
        ("ID=something\n", "install with its package manager"),
    ];
    for (os_release, expected) in table {
        let plan = Machine::new(os_release).plan();
        assert!(plan.contains(expected), "{os_release}: {plan}");
        assert!(!plan.contains("backports"), "{os_release}: {plan}");
        assert!(plan.contains("rustup"), "{os_release}: {plan}");
    }
    let mac = Machine::new("ID=macos\n").plan();
    assert!(!mac.contains("for Vulkan:"), "macOS has Metal: {mac}");
}

#[test]
fn debian_12_takes_the_driver_from_backports() {
    let entries = [
        (
            "etc/apt/sources.list.d/debian.sources",
            DEBIAN_SOURCES,
            "tee /etc/apt/sources.list.d/moe8-backports.sources >/dev/null <<'END'\nTypes: deb\n\
             URIs: http://mirror.example/debian\nSuites: bookworm-backports\nComponents: main contrib\n\
             Signed-By: /usr/share/keyrings/k.gpg\nEND\n",
        ),
        (
            "etc/apt/sources.list",
            "# deb http://old.example/debian bookworm main\ndeb-src http://mirror.example/debian bookworm main\n\
             deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main non-free\n",
            "tee /etc/apt/sources.list.d/moe8-backports.list >/dev/null <<'END'\n\
             deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm-backports main non-free\nEND\n",
        ),
    ];
    for (file, sources, expected) in entries {
        let machine = Machine::new(DEBIAN_12);
        machine.file(file, sources);
        // Entries of others for the same suite must not be taken for Debian's.
        machine.file("etc/apt/sources.list.d/a.list", "deb http://tool.example bookworm main\n");
        machine.file("etc/apt/sources.list.d/b.list", "deb http://tool.example/debian bookworm stable\n");
        let plan = machine.plan();
        assert!(plan.contains(expected), "{file}: {plan}");
        assert!(plan.contains("recommends -t bookworm-backports libvulkan1 mesa-vulkan-drivers\n"), "{plan}");
        assert!(plan.contains("recommends openmpi-bin libopenmpi-dev libclang-dev\n"), "{plan}");
    }
}

#[test]
fn no_new_file_where_backports_are_there_or_no_entry_is_found() {
    let machine = Machine::new(DEBIAN_12);
    let both =
        "deb http://m.example/debian bookworm main\ndeb http://m.example/debian bookworm-backports main\n";
    machine.file("etc/apt/sources.list", both);
    let plan = machine.plan();
    assert!(!plan.contains("tee ") && plan.contains("-t bookworm-backports libvulkan1"), "{plan}");

    let machine = Machine::new(DEBIAN_12);
    let off = DEBIAN_SOURCES.replace("Types:", "Enabled: no\nTypes:");
    machine.file("etc/apt/sources.list.d/debian.sources", &off);
    let plan = machine.plan();
    assert!(!plan.contains("backports") && plan.contains("mesa-vulkan-drivers"), "{plan}");
}

#[test]
fn an_old_lavapipe_is_upgraded_on_debian_12_only() {
    if Command::new("dpkg-query").arg("--version").output().is_err() {
        return; // the installed version is asked of dpkg
    }
    let status = "Package: mesa-vulkan-drivers\nStatus: install ok installed\nMaintainer: x\nArchitecture: amd64\n\
                  Description: x\nVersion: ";
    for (os, version, upgraded) in [
        (DEBIAN_12, "22.3.6-1", true),
        (DEBIAN_12, "25.0.7-2~bpo12+1", false),
        ("ID=ubuntu\n", "22.3.6-1", false),
    ] {
        let machine = Machine::new(os);
        machine.file("etc/apt/sources.list.d/debian.sources", DEBIAN_SOURCES);
        machine.file("usr/lib/x86_64-linux-gnu/libvulkan.so.1", "");
        machine.file("usr/share/vulkan/icd.d/lvp_icd.json", "{}");
        machine.file("var/lib/dpkg/status", &format!("{status}{version}\n"));
        let plan = machine.plan();
        assert_eq!(plan.contains("-t bookworm-backports mesa-vulkan-drivers"), upgraded, "{version}: {plan}");
    }
}

fn render_node(machine: &Machine, icd: &str, vendor: &str) {
    machine.file(&format!("usr/share/vulkan/icd.d/{icd}"), "{}");
    machine.file("dev/dri/renderD128", "");
    machine.file("sys/class/drm/renderD128/device/vendor", vendor);
}

#[test]
fn a_driver_counts_only_with_its_device() {
    type Set = fn(&Machine);
    let table: [(&str, Set, &str); 7] = [
        ("nothing", |_| (), "none"),
        ("lavapipe", |m| m.file("etc/vulkan/icd.d/lvp_icd.x86_64.json", "{}"), "software"),
        ("nvidia", Machine::nvidia, "hardware"),
        ("nvidia's manifest alone", |m| m.file("etc/vulkan/icd.d/nvidia_icd.json", "{}"), "none"),
        ("intel", |m| render_node(m, "intel_icd.json", "0x8086\n"), "hardware"),
        ("intel's driver, a virtual card", |m| render_node(m, "intel_icd.json", "0x1af4\n"), "none"),
        ("amd", |m| render_node(m, "radeon_icd.json", "0x1002\n"), "hardware"),
    ];
    for (name, set, expected) in table {
        let machine = Machine::new("ID=ubuntu\n");
        set(&machine);
        let plan = machine.plan();
        assert!(plan.contains(&format!("Vulkan driver: {expected};")), "{name}: {plan}");
        assert_eq!(plan.contains("mesa-vulkan-drivers"), expected == "none", "{name}: {plan}");
    }
}

#[test]
fn a_complete_machine_needs_nothing() {
    let machine = Machine::new(DEBIAN_12);
    machine.programs(&["cargo", "cc", "pkg-config"]);
    machine.file("usr/lib/x86_64-linux-gnu/libvulkan.so.1", "");
    machine.nvidia();
    machine.mpi();
    let plan = machine.plan();
    assert!(plan.contains("nothing to install") && !plan.contains("rustup"), "{plan}");
    let out = machine.command("scripts/setup.sh").output().unwrap();
    assert!(out.status.success() && out.stdout.is_empty(), "{}", text(&out));
}

#[test]
fn setup_fails_only_without_cargo_or_linker() {
    for (programs, code) in [(&["cargo", "cc"][..], 0), (&["cargo"], 1), (&["cc"], 1)] {
        let machine = Machine::new(DEBIAN_12);
        machine.programs(programs);
        let out = machine.command("scripts/setup.sh").env("MOE8_NO_INSTALL", "1").output().unwrap();
        assert_eq!(out.status.code(), Some(code), "{programs:?}: {}", text(&out));
        assert!(text(&out).contains("moe8 builds without"), "it says that MPI is missing: {}", text(&out));
    }
    let out = Machine::new("").command("scripts/setup.sh").arg("--dry").output().unwrap();
    assert!(out.status.code() == Some(2) && text(&out).contains("known: --dry-run"), "{}", text(&out));
}

#[test]
fn features_follow_the_machine() {
    type Set = fn(&Machine);
    let table: [(&str, Set, &str, &str); 5] = [
        ("", |_| (), "", "not found: mpicc mpirun libclang"),
        ("", Machine::mpi, "--features mpi", ""),
        ("", |m| m.programs(&["mpicc", "mpirun"]), "", "not found: libclang"),
        ("0", Machine::mpi, "", "MOE8_MPI=0"),
        ("1", |_| (), "--features mpi", ""),
    ];
    for (wish, set, flags, reason) in table {
        let machine = Machine::new(DEBIAN_12);
        set(&machine);
        let out = machine.command("scripts/features.sh").env("MOE8_MPI", wish).output().unwrap();
        assert!(out.status.success());
        assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), flags);
        assert!(String::from_utf8_lossy(&out.stderr).contains(reason), "{}", text(&out));
    }
}

/// The commands that run_train.sh would run after the set-up; `C` is the configuration's path.
fn train(machine: &Machine, environment: &[(&str, &str)], arguments: &[&str]) -> Vec<String> {
    let config = machine.root().join("c.toml");
    fs::write(&config, "").unwrap();
    let mut command = machine.command("run_train.sh");
    command.env("MOE8_DRY_RUN", "1").env("CONFIG_FILE", &config).args(arguments);
    let out = command.envs(environment.iter().copied()).output().unwrap();
    assert!(out.status.success(), "{}", text(&out));
    let shown = String::from_utf8(out.stdout).unwrap().replace(config.to_str().unwrap(), "C");
    let mut lines = shown.lines().map(str::to_owned);
    assert_eq!(lines.next().as_deref(), Some("./scripts/setup.sh"));
    lines.collect()
}

#[test]
fn run_train_without_mpi_uses_threads() {
    let plain = Machine::new(DEBIAN_12);
    assert_eq!(train(&plain, &[], &[]), ["cargo build --release", "target/release/moe8 train --config C"]);
    // More ranks than any machine has cores: one software thread each.
    assert_eq!(
        train(&plain, &[("NGPU", "9999"), ("CARGO_TARGET_DIR", "/t")], &["--training.steps=3"]),
        [
            "cargo build --release",
            "LP_NUM_THREADS=1",
            "/t/release/moe8 train --config C --ranks 9999 --training.steps=3"
        ]
    );
    assert_eq!(
        train(&plain, &[("NGPU", "2"), ("LP_NUM_THREADS", "7")], &[]).len(),
        2,
        "the user's own choice stays"
    );
}

#[test]
fn run_train_with_mpi_takes_upstream_s_command_line() {
    let mpi = Machine::new(DEBIAN_12);
    mpi.mpi();
    let build = "cargo build --release --features mpi".to_owned();
    assert_eq!(
        train(&mpi, &[("LOG_RANK", "0,1")], &[]),
        [build.clone(), "target/release/moe8 train --config C".to_owned()]
    );
    let arguments = [
        "--training.steps=10",
        "--model.converters=float8",
        "--float8.recipe_name=rowwise",
        "--float8.moe_fqns_prototype=experts",
        "--job.description=two words",
    ];
    let shown = arguments.join(" ").replace("two words", "two\\ words");
    let command = format!("mpirun -n 2 target/release/moe8 train --config C {shown}");
    let lines = train(&mpi, &[("NGPU", "2")], &arguments);
    assert_eq!((&lines[0], &lines[2]), (&build, &command));
    assert!(lines[1].starts_with("LP_NUM_THREADS="), "{lines:?}");
    mpi.nvidia(); // nothing to share out on a real GPU
    assert_eq!(train(&mpi, &[("NGPU", "2")], &arguments), [build, command]);
}

#[test]
fn run_train_refuses_what_makes_no_sense() {
    for (name, value, said) in [
        ("NGPU", "two", "not a number of ranks"),
        ("NGPU", "0", "not a number of ranks"),
        ("LOG_RANK", "all", "not a list of ranks"),
        ("CONFIG_FILE", "./configs/none.toml", "does not exist"),
    ] {
        let machine = Machine::new(DEBIAN_12);
        let out = machine.command("run_train.sh").env("MOE8_DRY_RUN", "1").env(name, value).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{name}={value}: {}", text(&out));
        assert!(text(&out).contains(said) && text(&out).contains("hint:"), "{name}={value}: {}", text(&out));
    }
}

/// run_train.sh for real, with a shell script for the program and one that does nothing for cargo.
#[test]
fn a_rank_that_dies_stops_the_job() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        return; // ranks as processes need it
    }
    let machine = Machine::new(DEBIAN_12);
    let program = "#!/bin/sh\necho rank $OMPI_COMM_WORLD_RANK of 3: LOG_RANK=$LOG_RANK \"$@\"\n\
                   [ \"$OMPI_COMM_WORLD_RANK\" = 1 ] && exit 3\nsleep 100\n";
    machine.executable("release/moe8", program);
    machine.executable("usr/bin/cargo", "#!/bin/sh\n");
    let path = format!("{}:{}", machine.root().join("usr/bin").display(), std::env::var("PATH").unwrap());
    let mut command = machine.command("run_train.sh");
    command.env_remove("MOE8_ROOT").env("MOE8_NO_INSTALL", "1").env("MOE8_MPI", "1").env("PATH", path);
    command
        .env("CARGO_TARGET_DIR", machine.root())
        .env("CONFIG_FILE", "/dev/null")
        .env("NGPU", "3")
        .arg("--a=b c");
    let begin = std::time::Instant::now();
    let out = command.output().unwrap();
    assert!(begin.elapsed().as_secs() < 60, "the other ranks went on: {}", text(&out));
    assert!(!out.status.success() && text(&out).contains("3 ranks as MPI processes"), "{}", text(&out));
    assert!(text(&out).contains("LOG_RANK=0 train --config /dev/null --a=b c"), "{}", text(&out));
}
