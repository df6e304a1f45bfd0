package setup

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
)

// jarsMB is what the jars of [KafkaVersion] weigh, as measured; what Maven needs
// for itself comes on top, once.
const jarsMB = 44

// Plan is what [Ensure] would do.
type Plan struct {
	Missing []Item
	// Packages to be installed by apt, and what apt says that costs; -1 when apt
	// cannot say, because it has no package lists yet.
	Packages             []string
	DownloadMB, OnDiskMB float64
	FetchJars            bool
	// Refused says why this process cannot do it, "" when it can; Commands are
	// for a person then.
	Refused  string
	Commands []string

	sudo bool
}

// packageOf is Debian's name for what holds a part.
var packageOf = map[string]string{
	Postgres: "postgresql",
	RabbitMQ: "rabbitmq-server",
	Java:     "default-jre-headless",
	Maven:    "maven",
}

// plan looks at the machine and changes nothing.
func (m *machine) plan(ctx context.Context, items []Item) Plan {
	p := Plan{DownloadMB: -1, OnDiskMB: -1}
	for _, i := range items {
		if i.Found {
			continue
		}
		p.Missing = append(p.Missing, i)
		if pkg, ok := packageOf[i.Name]; ok {
			p.Packages = append(p.Packages, pkg)
		}
		if i.Name == KafkaJars {
			p.FetchJars = true
		}
	}
	if len(p.Packages) > 0 {
		p.sudo, p.Refused = m.rights(ctx)
		if m.debian {
			p.DownloadMB, p.OnDiskMB = m.measure(ctx, p.Packages)
		}
	}
	p.Commands = p.byHand(m.debian)
	if m.isRoot { // who often has no sudo
		for i, c := range p.Commands {
			p.Commands[i] = strings.ReplaceAll(c, "sudo ", "")
		}
	}
	return p
}

// Empty reports that nothing is missing.
func (p Plan) Empty() bool { return len(p.Missing) == 0 }

// OnlyOptional reports that a run can do without all that is missing.
func (p Plan) OnlyOptional() bool {
	for _, i := range p.Missing {
		if !i.Optional {
			return false
		}
	}
	return true
}

// byHand lists the commands that do what Ensure does.
func (p Plan) byHand(debian bool) []string {
	var c []string
	switch {
	case len(p.Packages) == 0:
	case !debian:
		for _, i := range p.Missing {
			if _, ok := packageOf[i.Name]; ok {
				c = append(c, fmt.Sprintf("# install %s (%s)", i.Name, i.Why))
			}
		}
	default:
		c = append(c,
			"sudo apt-get update",
			"# keeps the servers from starting; if the file exists already, put it aside first",
			`printf '#!/bin/sh\nexit 101\n' | sudo tee `+policyFile+" > /dev/null && sudo chmod 755 "+policyFile,
			"sudo mkdir -p "+clusterDir+" && echo 'create_main_cluster = false' | sudo tee "+clusterDir+"/"+clusterFile,
			"sudo apt-get install --no-install-recommends "+strings.Join(p.Packages, " "),
			"sudo rm "+policyFile+" "+clusterDir+"/"+clusterFile,
			"# and where systemd runs, so that they do not start at the next boot either",
			"sudo systemctl disable postgresql rabbitmq-server epmd.socket",
		)
	}
	if p.FetchJars {
		c = append(c, "YES=1 "+again()+"   # fetches the jars of Kafka, needs no rights")
	}
	return c
}

// again is the command that looks once more and does the rest, as this process
// was called: bin/ is not on anybody's PATH.
func again() string { return os.Args[0] + " setup" }

// String is what a person reads before being asked.
func (p Plan) String() string {
	var b strings.Builder
	b.WriteString("Missing on this machine:\n")
	for _, i := range p.Missing {
		fmt.Fprintf(&b, "  %-18s %s\n", i.Name, i.Why)
	}
	b.WriteString("To be done:\n")
	if len(p.Packages) > 0 {
		fmt.Fprintf(&b, "  install with apt, without recommended packages: %s\n", strings.Join(p.Packages, " "))
		fmt.Fprintf(&b, "    %s\n", p.cost())
	}
	if p.FetchJars {
		dir, _ := KafkaDir() // an error is in the item's Why
		fmt.Fprintf(&b, "  fetch the jars of Kafka %s through Maven into %s: about %d MB\n", KafkaVersion, dir, jarsMB)
	}
	b.WriteString("Not touched: no service is started or enabled, no database cluster is made or changed,\n" +
		"no package that is there is upgraded or removed, no configuration outside the new packages.\n")
	return b.String()
}

func (p Plan) cost() string {
	if p.DownloadMB < 0 {
		return "apt has no package lists yet to say how much that is; on Debian 12 with nothing there about 180 MB to download, 630 MB on disk"
	}
	return fmt.Sprintf("%.0f MB to download, %.0f MB on disk, says apt", p.DownloadMB, p.OnDiskMB)
}

// rights says whether apt can be run here, with sudo or without.
func (m *machine) rights(ctx context.Context) (sudo bool, refused string) {
	if !m.debian {
		return false, "this is no Debian with apt"
	}
	if m.isRoot {
		return false, ""
	}
	if m.exec(ctx, io.Discard, "sudo", "-n", "true") != nil {
		return false, "this needs root, and sudo asks for a password or is missing"
	}
	return true, ""
}

var (
	needToGet = regexp.MustCompile(`Need to get (?:[\d.,]+ [kMG]?B/)?([\d.,]+) ([kMG]?B) of archives`)
	afterThis = regexp.MustCompile(`After this operation, ([\d.,]+) ([kMG]?B) of additional disk space`)
)

// measure asks apt what it would do; it changes nothing and takes no lock.
func (m *machine) measure(ctx context.Context, packages []string) (downloadMB, onDiskMB float64) {
	argv := append([]string{
		"apt-get", "install", "--assume-no", "-o", "Debug::NoLocking=1", "--no-install-recommends", "--no-upgrade",
	}, packages...)
	out := m.text(ctx, argv...) // it answers its own question with no, which is an error
	return megabytes(needToGet, out), megabytes(afterThis, out)
}

// megabytes reads an amount as apt prints it, -1 when there is none.
func megabytes(pattern *regexp.Regexp, text string) float64 {
	m := pattern.FindStringSubmatch(text)
	if m == nil {
		return -1
	}
	n, err := strconv.ParseFloat(strings.ReplaceAll(m[1], ",", ""), 64)
	if err != nil {
		return -1
	}
	return n * map[string]float64{"B": 1e-6, "kB": 1e-3, "MB": 1, "GB": 1e3}[m[2]]
}

// machine is where things are installed; tests take another one.
type machine struct {
	root   string // prefix of the paths that are written
	debian bool
	isRoot bool
	// exec runs a command; both its outputs go to out.
	exec func(ctx context.Context, out io.Writer, argv ...string) error
}

func thisMachine() *machine {
	_, noApt := exec.LookPath("apt-get")
	_, noDpkg := os.Stat("/etc/debian_version")
	return &machine{
		debian: noApt == nil && noDpkg == nil,
		isRoot: os.Geteuid() == 0,
		exec:   execute,
	}
}

func execute(ctx context.Context, out io.Writer, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stdout, cmd.Stderr = out, out
	// Ctrl-C must not reach dpkg half-way through a package.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(argv, " "), err)
	}
	return nil
}

// text runs a command and returns what it printed, whether it failed or not.
func (m *machine) text(ctx context.Context, argv ...string) string {
	var out strings.Builder
	_ = m.exec(ctx, &out, argv...)
	return out.String()
}
