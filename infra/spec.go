package infra

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// WithDefaults fills in what was left out, for a provider.
func (s Spec) WithDefaults() Spec {
	if !s.Postgres && !s.RabbitMQ && !s.Kafka {
		s.Postgres, s.RabbitMQ, s.Kafka = true, true, true
	}
	if s.RabbitNodes == 0 {
		s.RabbitNodes = 3
	}
	if s.Progress == nil {
		s.Progress = func(string, string) {}
	}
	return s
}

// MakeLogDir also makes the path absolute: the guardian, which opens the logs,
// works in another directory.
func (s *Spec) MakeLogDir() (err error) {
	if s.LogDir == "" {
		return errors.New("infra.Spec.LogDir is empty")
	}
	if s.LogDir, err = filepath.Abs(s.LogDir); err == nil {
		err = os.MkdirAll(s.LogDir, 0o755)
	}
	if err != nil {
		return fmt.Errorf("make the directory of the logs: %w", err)
	}
	return nil
}
