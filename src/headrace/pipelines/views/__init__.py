"""Views: definitions read from Spark, and the engine that keeps them right."""
