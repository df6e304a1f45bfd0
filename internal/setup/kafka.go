package setup

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// kafkaPOM names what is fetched. Kafka's own POM leaves out the logging
// backend that its server needs at run time.
//
//go:embed kafka.pom.xml
var kafkaPOM []byte

// kafkaJars is the list of what must arrive: SHA-256 and name, as sha256sum
// prints them. A release in a Maven repository never changes.
//
//go:embed kafka.jars
var kafkaJars string

// dependencyPlugin is pinned, so that the same is fetched by every Maven.
const dependencyPlugin = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"

// listName is the file in the cache that says which jars belong there.
const listName = "jars.txt"

type jar struct{ name, sum string }

func wantedJars() []jar {
	var jars []jar
	for line := range strings.Lines(kafkaJars) {
		if f := strings.Fields(line); len(f) == 2 {
			jars = append(jars, jar{name: f[1], sum: f[0]})
		}
	}
	return jars
}

// kafkaComplete reports whether dir holds this list and every jar of it. Their
// contents were checked before the directory got its name.
func kafkaComplete(dir string) bool {
	list, err := os.ReadFile(filepath.Join(dir, listName))
	if err != nil || string(list) != kafkaJars {
		return false
	}
	for _, j := range wantedJars() {
		if !isFile(filepath.Join(dir, "lib", j.name)) {
			return false
		}
	}
	return true
}

// fetchKafka fills the cache through Maven, with the settings and repositories
// of the user's Maven. Readers see the whole directory or none: it is filled
// under another name. Killed in between, that other directory is left and does
// no harm.
func fetchKafka(ctx context.Context, mvn, dir string, out io.Writer) (err error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	filling, err := os.MkdirTemp(filepath.Dir(dir), filepath.Base(dir)+".filling-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(filling)) }()
	pom := filepath.Join(filling, "pom.xml")
	if err := os.WriteFile(pom, kafkaPOM, 0o644); err != nil {
		return err
	}
	lib := filepath.Join(filling, "lib")
	err = execute(ctx, out, mvn, "-q", "-B", "-Dstyle.color=never", "-f", pom, dependencyPlugin,
		"-DoutputDirectory="+lib, "-DincludeScope=runtime")
	if err != nil {
		return fmt.Errorf("fetch Kafka's jars: %w", err)
	}
	if err := verify(lib); err != nil {
		return fmt.Errorf("fetch Kafka's jars: %w", err)
	}
	if err := os.WriteFile(filepath.Join(filling, listName), []byte(kafkaJars), 0o644); err != nil {
		return err
	}
	if err := os.Chmod(filling, 0o755); err != nil {
		return err
	}
	return publish(filling, dir)
}

// verify compares what arrived with the list.
func verify(lib string) error {
	var errs []error
	wanted := wantedJars()
	for _, j := range wanted {
		sum, err := sumOf(filepath.Join(lib, j.name))
		switch {
		case err != nil:
			errs = append(errs, err)
		case sum != j.sum:
			errs = append(errs, fmt.Errorf("%s has SHA-256 %s, not %s", j.name, sum, j.sum))
		}
	}
	entries, err := os.ReadDir(lib)
	if err == nil && len(entries) != len(wanted) {
		err = fmt.Errorf("%d files arrived, the list has %d", len(entries), len(wanted))
	}
	return errors.Join(append(errs, err)...)
}

func sumOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// publish gives the filled directory its name. An incomplete one of that name is
// removed first; a complete one was put there by another process meanwhile, and
// stays.
func publish(filled, dir string) error {
	if kafkaComplete(dir) {
		return nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	err := os.Rename(filled, dir)
	if err != nil && kafkaComplete(dir) {
		return nil
	}
	return err
}
