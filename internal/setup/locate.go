// Package setup finds the servers that a run needs, says what is missing, and
// installs it when it is allowed to.
//
// It guarantees that nothing is changed before the user, or YES=1 or CI=true,
// has agreed; that no service is started or enabled; and that whatever it puts
// aside for the time of an installation is put back, also after a failure.
//
// It must not import infra or system: infra asks it where the servers are.
package setup

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
)

// MinPostgres is the oldest major version that serves: 14 brought
// idle_session_timeout, 15 is what Debian 12 ships and what is tested.
const MinPostgres = 15

// MinJava is the oldest release that Kafka 4 runs on.
const MinJava = 17

// KafkaVersion is the release whose jars are fetched.
const KafkaVersion = "4.3.1"

// Paths is where the servers are; an empty field is a part that is missing.
type Paths struct {
	PostgresBin   string // directory of initdb and postgres
	PostgresMajor int
	RabbitMQBin   string // directory of the scripts, not the wrappers of Debian
	Epmd          string // Erlang's port mapper
	ErlangBin     string // directory of erl
	Java          string // file
	JavaMajor     int
	Maven         string // file
	KafkaLib      string // directory of jars
	KafkaVersion  string
}

// Locate looks for the servers in the places where packages put them, then
// along PATH. It starts at most "java -version".
func Locate() Paths {
	var p Paths
	p.PostgresBin, p.PostgresMajor = locatePostgres("/usr/lib/postgresql")
	p.RabbitMQBin = locateRabbitMQ()
	p.Epmd = lookPath("epmd")
	if erl := lookPath("erl"); erl != "" {
		p.ErlangBin = filepath.Dir(erl)
	}
	p.Java, p.JavaMajor = locateJava()
	p.Maven = lookPath("mvn")
	if dir, err := KafkaDir(); err == nil && kafkaComplete(dir) {
		p.KafkaLib, p.KafkaVersion = filepath.Join(dir, "lib"), KafkaVersion
	}
	return p
}

// KafkaDir is where Kafka's jars are kept: lib/ with the jars, and their list.
func KafkaDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(cache, "mailproof", "kafka-"+KafkaVersion), nil
}

// locatePostgres takes the newest version that Debian's packages have put below
// root, or else what PATH finds.
func locatePostgres(root string) (dir string, major int) {
	found, _ := filepath.Glob(filepath.Join(root, "*", "bin", "initdb")) // only a bad pattern is an error
	sort.Slice(found, func(i, j int) bool { return versionOf(found[i]) > versionOf(found[j]) })
	for _, initdb := range found {
		bin := filepath.Dir(initdb)
		if v := versionOf(initdb); v >= MinPostgres && isFile(filepath.Join(bin, "postgres")) {
			return bin, v
		}
	}
	initdb := lookPath("initdb")
	if initdb == "" {
		return "", 0
	}
	initdb, err := filepath.EvalSymlinks(initdb)
	if err != nil {
		return "", 0
	}
	bin := filepath.Dir(initdb)
	v := postgresVersion(filepath.Join(bin, "postgres"))
	if v < MinPostgres {
		return "", 0
	}
	return bin, v
}

// versionOf reads the version out of …/15/bin/initdb.
func versionOf(initdb string) int {
	v, err := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(initdb))))
	if err != nil {
		return 0
	}
	return v
}

var firstNumber = regexp.MustCompile(`\d+`)

func postgresVersion(postgres string) int {
	out, err := exec.Command(postgres, "--version").Output() // "postgres (PostgreSQL) 15.14 …"
	if err != nil {
		return 0
	}
	v, err := strconv.Atoi(firstNumber.FindString(string(out)))
	if err != nil {
		return 0
	}
	return v
}

// locateRabbitMQ avoids what PATH finds on Debian: that wrapper changes user and
// home directory, and with them the cookie and the place of the data.
func locateRabbitMQ() string {
	dirs := []string{"/usr/lib/rabbitmq/bin"}
	if found := lookPath("rabbitmq-server"); found != "" {
		if real, err := filepath.EvalSymlinks(found); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	for _, d := range dirs {
		if isFile(filepath.Join(d, "rabbitmq-env")) && isFile(filepath.Join(d, "rabbitmq-server")) {
			return d
		}
	}
	return ""
}

var javaVersion = regexp.MustCompile(`version "(?:1\.)?(\d+)`)

// locateJava prefers JAVA_HOME, as Java's own tools do.
func locateJava() (path string, major int) {
	candidates := []string{lookPath("java")}
	if home := os.Getenv("JAVA_HOME"); home != "" {
		candidates = append([]string{filepath.Join(home, "bin", "java")}, candidates...)
	}
	for _, c := range candidates {
		if c == "" {
			continue
		}
		out, err := exec.Command(c, "-version").CombinedOutput()
		if err != nil {
			continue
		}
		m := javaVersion.FindSubmatch(out)
		if m == nil {
			continue
		}
		if v, _ := strconv.Atoi(string(m[1])); v >= MinJava {
			return c, v
		}
	}
	return "", 0
}

// lookPath finds a program along PATH, and in the directories of the system
// that a user's PATH often lacks.
func lookPath(name string) string {
	if p, err := exec.LookPath(name); err == nil {
		if abs, err := filepath.Abs(p); err == nil {
			return abs
		}
	}
	for _, dir := range []string{"/usr/local/bin", "/usr/bin", "/usr/sbin", "/usr/local/sbin"} {
		if p := filepath.Join(dir, name); isFile(p) {
			return p
		}
	}
	return ""
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.IsDir()
}
