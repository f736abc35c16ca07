"""Stock nbgrader, run in this folder: `nbgrader generate_assignment 03-attention` and so on."""

c = get_config()  # noqa: F821

c.CourseDirectory.course_id = "transformers"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "notebooks"
# A lab is one notebook. The text it is made from, and a learner's kept pieces, are not part of an assignment.
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "*.py", "mine", ".DS_Store"]

c.ClearSolutions.code_stub = {"python": "# Write your code here.\nraise NotImplementedError"}
c.Execute.timeout = 120  # seconds a cell; a check stops a piece by itself after 10
