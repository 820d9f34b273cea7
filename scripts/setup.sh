#!/usr/bin/env bash
# Gives this machine what moe8 needs: a C linker, a Vulkan loader and driver, and, where it can, MPI.
#
#   scripts/setup.sh             installs on Debian and Ubuntu, says what to install elsewhere
#   scripts/setup.sh --dry-run   prints the plan and changes nothing
#   scripts/setup.sh --force     tries again what failed within the last day
#
# MOE8_NO_INSTALL=1 prints the commands instead of running them. What is there already is left alone, and a run that
# finds nothing missing takes a fraction of a second. Exit code 1 only without cargo or without a C linker: software
# Vulkan and MPI can be missing, moe8 then says so itself.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

rust_needed=89 # 1.x, as in Cargo.toml
good_mesa=25   # lavapipe from this version on is three to five times faster than Debian 12's 22.3
tried_folder=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/moe8

dry_run='' force=''
for argument in "$@"; do
    case $argument in
        --dry-run) dry_run=1 ;;
        --force) force=1 ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" && exit ;;
        *) fail 2 "setup.sh: unknown argument '$argument'" "known: --dry-run, --force, --help" ;;
    esac
done

family=$(os_family)
driver=$(vulkan_driver)
[ "$family" != macos ] || driver=hardware # Metal is part of the system

# --- What is missing --------------------------------------------------------------------------------------------

c_linker() {
    have cc || return 1
    [ -z "$root" ] || return 0
    if [ "$family" = macos ]; then
        xcode-select -p >/dev/null 2>&1 # without the tools, cc only asks to install them
    else
        [ -e "$(cc -print-file-name=crt1.o)" ] # a compiler without the C library's start files cannot link
    fi
}

mesa_version() { # the installed major version; 0 without the package, or without dpkg
    local version
    command -v dpkg-query >/dev/null 2>&1 || { echo 0 && return; }
    version=$(dpkg-query --admindir="$root/var/lib/dpkg" -W -f='${Version}' mesa-vulkan-drivers 2>/dev/null || true)
    version=${version%%.*}
    echo "${version:-0}"
}

# Only Debian 11 and 12 have a Mesa older than $good_mesa in main and a newer one in backports.
has_backports() {
    [ "$(os_release ID)" = debian ] || return 1
    case $(os_release VERSION_ID) in 11 | 12) ;; *) return 1 ;; esac
}

old_software_driver() {
    local version
    [ "$driver" = software ] && has_backports || return 1
    version=$(mesa_version)
    [ "$version" -gt 0 ] && [ "$version" -lt $good_mesa ]
}

missing_build='' missing_vulkan='' missing_mpi='' # names of things, turned into packages per family
c_linker || missing_build="$missing_build linker"
# A convenience of the build: fetched where that costs nothing, not asked of those who have to type.
if ! have pkg-config && { [ "$family" = debian ] || [ -n "$missing_build" ]; } && [ "$family" != macos ]; then
    missing_build="$missing_build pkgconfig"
fi
[ "$family" = macos ] || vulkan_loader || missing_vulkan="$missing_vulkan loader"
[ "$driver" != none ] || missing_vulkan="$missing_vulkan driver"
! old_software_driver || missing_vulkan="$missing_vulkan newer-driver"
if [ "${MOE8_MPI:-}" != 0 ]; then
    mpi_compiler && mpi_launcher >/dev/null || missing_mpi="$missing_mpi mpi"
    libclang || missing_mpi="$missing_mpi libclang"
fi

# The packages of this family for one of those names.
packages_of() {
    case $family:$1 in
        debian:linker) echo gcc libc6-dev ;;
        debian:pkgconfig) echo pkg-config ;;
        debian:loader) echo libvulkan1 ;;
        debian:driver | debian:newer-driver) echo mesa-vulkan-drivers ;;
        debian:mpi) echo openmpi-bin libopenmpi-dev ;;
        debian:libclang) echo libclang-dev ;;
        fedora:linker) echo gcc ;;
        fedora:pkgconfig) echo pkgconf-pkg-config ;;
        fedora:loader) echo vulkan-loader ;;
        fedora:driver) echo mesa-vulkan-drivers ;;
        fedora:mpi) echo openmpi openmpi-devel ;;
        fedora:libclang) echo clang-devel ;;
        arch:linker) echo gcc ;;
        arch:pkgconfig) echo pkgconf ;;
        arch:loader) echo vulkan-icd-loader ;;
        arch:driver) echo vulkan-swrast ;;
        arch:mpi) echo openmpi ;;
        arch:libclang) echo clang ;;
        opensuse:linker) echo gcc ;;
        opensuse:pkgconfig) echo pkg-config ;;
        opensuse:loader) echo libvulkan1 ;;
        opensuse:driver) echo libvulkan_lvp ;;
        opensuse:mpi) echo openmpi4 openmpi4-devel ;;
        opensuse:libclang) echo clang-devel ;;
        alpine:linker) echo build-base ;;
        alpine:pkgconfig) echo pkgconf ;;
        alpine:loader) echo vulkan-loader ;;
        alpine:driver) echo mesa-vulkan-swrast ;;
        alpine:mpi) echo openmpi openmpi-dev ;;
        alpine:libclang) echo clang clang-libclang ;;
        macos:mpi) echo open-mpi ;;
        macos:libclang) echo llvm ;;
    esac
}

packages() { # of all the names given, on one line
    local name list=''
    for name in "$@"; do list="$list $(packages_of "$name")"; done
    echo "$list" | tr -s ' ' | sed 's/^ //; s/ $//'
}

# shellcheck disable=SC2086 # lists of names: the splitting is meant
build_packages=$(packages $missing_build)
# shellcheck disable=SC2086
vulkan_packages=$(packages $missing_vulkan)
# shellcheck disable=SC2086
mpi_packages=$(packages $missing_mpi)

# --- Debian: the backports suite, from the machine's own source entry ---------------------------------------------

backports_suite=''
if [ -n "$vulkan_packages" ] && [ "$family" = debian ] && has_backports; then
    case $missing_vulkan in *driver*) backports_suite=$(os_release VERSION_CODENAME)-backports ;; esac
fi

apt_lists() { # the distribution's own files first
    local file
    for file in "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/debian.sources \
        "$root"/etc/apt/sources.list.d/*.sources "$root"/etc/apt/sources.list.d/*.list; do
        [ -r "$file" ] && echo "$file"
    done
}

# From one file of entries in deb822 format ($1), the first one with the suite $2, the component main and an address
# that matches $3, with $2-backports for its suites. Continuation lines (an embedded key) stay.
rewritten_stanza() {
    awk -v suite="$2" -v address="$3" -v RS='' '
    {
        text = ""; field = ""; split("", value)
        n = split($0, line, "\n")
        for (i = 1; i <= n; i++) {
            if (line[i] ~ /^#/) continue
            if (line[i] !~ /^[ \t]/) { name = line[i]; sub(/:.*/, "", name); field = tolower(name); sub(/^[^:]*:/, "", line[i]) }
            else { if (field != "suites") text = text line[i] "\n"; value[field] = value[field] " " line[i]; continue }
            value[field] = line[i]
            if (field == "types") line[i] = " deb"
            if (field == "suites") line[i] = " " suite "-backports"
            text = text name ":" line[i] "\n"
        }
        if (tolower(value["enabled"]) ~ /no|false|0/ || value["uris"] !~ address) next
        if ((value["types"] " ") !~ /[ \t]deb[ \t]/ || (value["components"] " ") !~ /[ \t]main[ \t]/) next
        if (index(value["suites"] " ", " " suite " ")) { printf "%s", text; exit }
    }' "$1"
}

# The same for a file of one-line entries: deb [options] address suite components.
rewritten_line() {
    awk -v suite="$2" -v address="$3" '
    $1 == "deb" {
        at = 2
        if ($2 ~ /^\[/) { while (at < NF && $at !~ /\]$/) at++; at++ }
        if ($(at + 1) != suite || $at !~ address || ($0 " ") !~ /[ \t]main[ \t]/) next
        $(at + 1) = suite "-backports"; print; exit
    }' "$1"
}

# The machine's own entry for the suite $1 as one for $1-backports, in the format it was found in: the same address,
# key and options. An address that names Debian is preferred to any other. Nothing where no entry has that suite.
rewritten_entry() {
    local file entry address
    for address in '[dD]ebian' '.'; do
        while IFS= read -r file; do
            case $file in
                *.sources) entry=$(rewritten_stanza "$file" "$1" "$address") ;;
                *) entry=$(rewritten_line "$file" "$1" "$address") ;;
            esac
            [ -z "$entry" ] || { printf '%s\n' "$entry" && return 0; }
        done < <(apt_lists)
    done
}

has_suite() {
    local file words=''
    while IFS= read -r file; do words="$words $(sed 's/#.*//' "$file" | tr '\n\t' '  ')"; done < <(apt_lists)
    case "$words " in *" $1 "*) ;; *) return 1 ;; esac
}

# The file that holds the backports entry, and the entry; both empty where none is to be written.
backports_entry='' backports_file=''
if [ -n "$backports_suite" ] && ! has_suite "$backports_suite"; then
    backports_entry=$(rewritten_entry "$(os_release VERSION_CODENAME)")
    case $backports_entry in
        '') backports_suite='' ;; # no entry to derive it from: main it is
        deb\ *) backports_file=/etc/apt/sources.list.d/moe8-backports.list ;;
        *) backports_file=/etc/apt/sources.list.d/moe8-backports.sources ;;
    esac
fi

# --- The plan, as commands to type ----------------------------------------------------------------------------------

sudo_word='sudo '
[ "$(id -u)" != 0 ] || sudo_word=''

debian_plan() {
    if [ -n "$backports_file" ]; then
        printf "%stee %s >/dev/null <<'END'\n%s\nEND\n" "$sudo_word" "$backports_file" "$backports_entry"
    fi
    echo "${sudo_word}apt-get update"
    [ -z "$build_packages" ] || echo "${sudo_word}apt-get install -y --no-install-recommends $build_packages"
    [ -z "$vulkan_packages" ] ||
        echo "${sudo_word}apt-get install -y --no-install-recommends ${backports_suite:+-t $backports_suite }$vulkan_packages"
    [ -z "$mpi_packages" ] || echo "${sudo_word}apt-get install -y --no-install-recommends $mpi_packages"
}

macos_plan() {
    case $missing_build in *linker*) echo "xcode-select --install" ;; esac
    [ -z "$mpi_packages" ] || echo "brew install $mpi_packages"
}

print_plan() {
    local all="$build_packages $vulkan_packages $mpi_packages"
    all=$(echo "$all" | tr -s ' ' | sed 's/^ //; s/ $//')
    case $family in
        debian) debian_plan ;;
        fedora)
            echo "${sudo_word}dnf install $all"
            [ -z "$mpi_packages" ] || echo "# MPI needs its folders in PATH: module load mpi/openmpi-$(uname -m)"
            ;;
        arch) echo "${sudo_word}pacman -S --needed $all" ;;
        opensuse) echo "${sudo_word}zypper install $all" ;;
        alpine)
            echo "${sudo_word}apk add $all"
            echo "# use Alpine's own cargo (apk add cargo): a static build cannot load Vulkan drivers"
            ;;
        macos) macos_plan ;;
        *)
            echo "# this system is not known to setup.sh; install with its package manager:"
            echo "#   a C compiler$([ -z "$missing_vulkan" ] || echo ", the Vulkan loader, a Vulkan driver (Mesa's lavapipe without a GPU)")"
            [ -z "$missing_mpi" ] || echo "#   for ranks as processes: Open MPI or MPICH with headers, and libclang"
            ;;
    esac
}

# --- Doing it (Debian and Ubuntu) -------------------------------------------------------------------------------------

# Rights to install: as root, with sudo, or by asking for a password on a terminal.
may_install() {
    [ -z "${MOE8_NO_INSTALL:-}" ] && [ -z "$root" ] && [ "$family" = debian ] && have apt-get || return 1
    [ -n "$sudo_word" ] || return 0
    have sudo || return 1
    sudo -n true 2>/dev/null && return 0
    [ -t 0 ] && say "sudo may ask for your password" && sudo -v
}

# Failed attempts at what can be done without are not repeated within a day.
tried() { [ -z "$force" ] && [ -n "$(find "$tried_folder/$1" -mmin -1440 2>/dev/null)" ]; }
note_tried() { { mkdir -p "$tried_folder" && : >"$tried_folder/$1"; } 2>/dev/null || true; }

as_root() { ${sudo_word:+sudo} "$@"; }
apt_log=''
apt() { # apt-get, quietly; its last lines where it fails
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 \
        -o Acquire::http::Timeout=30 "$@" >"$apt_log" 2>&1 </dev/null && return 0
    say "apt-get $1 failed:"
    tail -n 5 "$apt_log" | sed 's/^/    /'
    return 1
}
apt_install() { say "installing $*" && apt install --no-install-recommends "$@"; }

add_backports() {
    [ -n "$backports_file" ] || return 0
    say "adding the suite $backports_suite for a newer software Vulkan driver ($backports_file)"
    printf '%s\n' "$backports_entry" | as_root tee "$backports_file" >/dev/null
}

# Forgets the suite where the package source does not have it, so that later runs of apt-get do not complain.
check_backports() {
    [ -n "$backports_suite" ] || return 0
    case $(apt-cache madison mesa-vulkan-drivers 2>/dev/null) in *" $backports_suite/"*) return 0 ;; esac
    say "$backports_suite does not answer: the main suite's driver it is"
    backports_suite=''
    [ -z "$backports_file" ] || as_root rm -f "$backports_file"
}

install_vulkan() {
    local list
    # shellcheck disable=SC2206 # a list of names: the splitting is meant
    list=($vulkan_packages)
    [ -z "$backports_suite" ] || { apt_install -t "$backports_suite" "${list[@]}" && return 0; }
    [ "$missing_vulkan" != " newer-driver" ] || return 1
    apt_install "${list[@]}"
}

# shellcheck disable=SC2086 # lists of names: the splitting is meant
debian_install() {
    apt_log=$(mktemp)
    trap 'rm -f "$apt_log"' EXIT
    add_backports
    say "reading the package lists"
    apt update || true
    check_backports
    local failed=''
    if [ -n "$build_packages" ]; then apt_install $build_packages || failed=1; fi
    if [ -n "$vulkan_packages" ]; then install_vulkan || { note_tried vulkan && failed=1; }; fi
    if [ -n "$mpi_packages" ]; then apt_install $mpi_packages || { note_tried mpi && failed=1; }; fi
    [ -z "$failed" ] || { say "not all of it could be installed; to try by hand:" && print_plan; }
}

# --- Main -------------------------------------------------------------------------------------------------------------

nothing_missing() { [ -z "$missing_build$missing_vulkan$missing_mpi" ]; }

say_missing() {
    [ -z "$missing_build" ] || say "missing to build:$missing_build"
    [ -z "$missing_vulkan" ] || say "missing for Vulkan:$missing_vulkan"
    [ -z "$missing_mpi" ] || say "missing for ranks as MPI processes (moe8 builds without, with ranks as threads):$missing_mpi"
}

check_rust() {
    local version
    have cargo || { say "Rust is missing: get it with rustup, from https://rustup.rs, then start this again" && return 1; }
    [ -z "$root" ] || return 0
    version=$(rustc --version 2>/dev/null | sed -n 's/^rustc 1\.\([0-9]*\).*/\1/p')
    [ -n "$version" ] && [ "$version" -lt $rust_needed ] || return 0
    say "Rust 1.$version is too old, moe8 needs 1.$rust_needed: rustup update, or rustup from https://rustup.rs"
    return 1
}

if [ -n "$dry_run" ]; then
    say "system: $family $(os_release VERSION_ID); Vulkan driver: $driver; rank processes: $([ -z "$missing_mpi" ] && echo yes || echo no)"
    say_missing
    if nothing_missing; then say "nothing to install"; else print_plan; fi
    check_rust || true
    exit 0
fi

# Leave out what failed within the last day and is not needed.
if [ "$missing_vulkan" = " newer-driver" ] && tried vulkan; then
    missing_vulkan='' vulkan_packages='' backports_suite='' backports_file=''
fi
if [ -n "$missing_mpi" ] && tried mpi; then missing_mpi='' mpi_packages=''; fi

if ! nothing_missing; then
    say_missing
    if may_install; then
        debian_install
    else
        say "setup.sh does not install this here; to do it yourself:"
        print_plan
    fi
fi

ready=0
check_rust || ready=1
c_linker || { say "no C linker: install a C compiler (see the commands above)" && ready=1; }
exit $ready
