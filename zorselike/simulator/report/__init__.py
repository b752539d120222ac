"""A simulated step for people: a page, a Gantt chart, a picture, a Chrome trace."""
