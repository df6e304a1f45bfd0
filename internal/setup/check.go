package setup

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Names of the parts, as printed.
const (
	Postgres  = "PostgreSQL server"
	RabbitMQ  = "RabbitMQ server"
	Java      = "Java runtime"
	Maven     = "Maven"
	KafkaJars = "Kafka"
)

// Item is one part that a run uses.
type Item struct {
	Name    string
	Found   bool
	Version string // of what was found
	Path    string
	// Why says what is missing, Fix which commands would bring it.
	Why string
	Fix []string
	// Optional parts have a stand-in: without them kfake takes Kafka's place.
	Optional bool
}

// askTimeout bounds a question to a program about its version.
const askTimeout = 10 * time.Second

// Check says of each part whether it is there. Maven is looked for only where
// Kafka's jars are still to be fetched.
func Check(ctx context.Context) []Item { return check(ctx, Locate()) }

func check(ctx context.Context, p Paths) []Item {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	items := []Item{postgresItem(ctx, p), rabbitItem(p), javaItem(p)}
	if p.KafkaLib == "" {
		items = append(items, mavenItem(ctx, p))
	}
	return append(items, kafkaItem(p))
}

func postgresItem(ctx context.Context, p Paths) Item {
	i := Item{Name: Postgres, Path: p.PostgresBin}
	if p.PostgresBin == "" {
		i.Why = fmt.Sprintf("no initdb and postgres of version %d or newer", MinPostgres)
		i.Fix = aptFix("postgresql")
		return i
	}
	i.Found = true
	i.Version = firstMatch(`\d+(\.\d+)*`, say(ctx, filepath.Join(p.PostgresBin, "postgres"), "--version"))
	return i
}

func rabbitItem(p Paths) Item {
	i := Item{Name: RabbitMQ, Path: p.RabbitMQBin}
	var missing []string
	for _, part := range []struct{ name, path string }{
		{"rabbitmq-server", p.RabbitMQBin},
		{"erl", p.ErlangBin},
		{"epmd", p.Epmd},
	} {
		if part.path == "" {
			missing = append(missing, part.name)
		}
	}
	if len(missing) > 0 {
		i.Why = "no " + strings.Join(missing, ", ")
		i.Fix = aptFix("rabbitmq-server")
		return i
	}
	i.Found = true
	// Asking rabbitmqctl takes a second and starts a port mapper that stays.
	if lib, _ := filepath.Glob(filepath.Join(p.RabbitMQBin, "..", "lib", "rabbitmq_server-*")); len(lib) == 1 {
		i.Version = strings.TrimPrefix(filepath.Base(lib[0]), "rabbitmq_server-")
	}
	return i
}

func javaItem(p Paths) Item {
	i := Item{Name: Java, Path: p.Java, Optional: true}
	if p.Java == "" {
		i.Why = fmt.Sprintf("no java of version %d or newer", MinJava)
		i.Fix = aptFix("default-jre-headless")
		return i
	}
	i.Found, i.Version = true, fmt.Sprint(p.JavaMajor)
	return i
}

func mavenItem(ctx context.Context, p Paths) Item {
	i := Item{Name: Maven, Path: p.Maven, Optional: true}
	if p.Maven == "" {
		i.Why = "no mvn, which fetches Kafka's jars"
		i.Fix = aptFix("maven")
		return i
	}
	i.Found = true
	i.Version = firstMatch(`\d+(\.\d+)+`, say(ctx, p.Maven, "-B", "--version"))
	return i
}

func kafkaItem(p Paths) Item {
	i := Item{Name: KafkaJars, Path: p.KafkaLib, Version: p.KafkaVersion, Optional: true}
	if p.KafkaLib != "" {
		i.Found = true
		return i
	}
	dir, err := KafkaDir()
	if err != nil {
		dir = err.Error()
	}
	i.Why = fmt.Sprintf("no jars of Kafka %s in %s", KafkaVersion, dir)
	i.Fix = []string{again()}
	return i
}

// aptFix is how a person installs a package without starting what is in it.
func aptFix(pkg string) []string {
	as := "sudo "
	if os.Geteuid() == 0 {
		as = ""
	}
	return []string{as + "apt-get install --no-install-recommends " + pkg}
}

// say runs a program and returns what it prints, "" when it fails: a version is
// for information.
func say(ctx context.Context, argv ...string) string {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
	if err != nil {
		return ""
	}
	return string(out)
}

func firstMatch(pattern, s string) string { return regexp.MustCompile(pattern).FindString(s) }
